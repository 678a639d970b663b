"""How much of `dflash/` the tests run: lines and branches of `make test`, its processes included, as `coverage` counts them.

A lower bound: processes that a test kills cannot tell what they ran, and what only a GPU runs counts as not covered.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, benchmark_parser, publish

NAME = "coverage_of_tests"
QUICK_TESTS = ("tests/unit/rollback",)
LEAST_FRAC = 0.9
LEAST_COVERED = 12
"""Files with the smallest share are named, so many of them."""


def main() -> int:
    """Run the benchmark; see `--help`."""
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument("--workers", type=int, default=4, help="test processes at once")
    parser.add_argument("tests", nargs="*", help="some tests instead of all; nothing is stored then")
    arguments = parser.parse_args()
    tests = arguments.tests or (QUICK_TESTS if arguments.quick else ())
    arguments.quick = arguments.quick or bool(tests)
    with tempfile.TemporaryDirectory() as folder:
        failed = _run_tests(Path(folder), tests, workers=arguments.workers)
        files = _measured(Path(folder))
    figures = {"tests_failed": failed, **figures_of(files)}
    publish(NAME, figures, arguments)
    return 0 if not failed and (arguments.quick or figures["covered_frac"] >= LEAST_FRAC) else 1


def figures_of(files: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Shares of everything, by room, and the least covered files.

    Args:
        files: path below the repository to coverage's counts of statements and branches.
    """
    rooms: dict[str, list[Mapping[str, int]]] = defaultdict(list)
    for path, counts in files.items():
        parts = Path(path).parts
        rooms[parts[1] if len(parts) > 2 else "top"].append(counts)
    by_file = sorted((covered_frac([counts]), path) for path, counts in files.items())
    return {
        "covered_frac": covered_frac(list(files.values())),
        "branches_frac": _frac(files.values(), "covered_branches", "num_branches"),
        "statements_frac": _frac(files.values(), "covered_lines", "num_statements"),
        "statements": sum(counts["num_statements"] for counts in files.values()),
        "branches": sum(counts["num_branches"] for counts in files.values()),
        **{f"{room}_frac": covered_frac(found) for room, found in sorted(rooms.items())},
        "least_covered": {path: share for share, path in by_file[:LEAST_COVERED]},
    }


def covered_frac(files: Sequence[Mapping[str, int]]) -> float:
    """Share of statements and branches together, as `coverage report` gives it."""
    wanted = sum(counts["num_statements"] + counts["num_branches"] for counts in files)
    return round(sum(counts["covered_lines"] + counts["covered_branches"] for counts in files) / wanted, 4) if wanted else 1.0


def _frac(files: Any, covered: str, wanted: str) -> float:
    found = list(files)
    return round(sum(counts[covered] for counts in found) / max(1, sum(counts[wanted] for counts in found)), 4)


def _run_tests(folder: Path, tests: Sequence[str], *, workers: int) -> int:
    """Run the tests with every process measured; returns pytest's exit code."""
    command = [sys.executable, "-m", "coverage", "run", "-m", "pytest", "-q", "-n", str(workers), "--dist", "loadfile"]
    environment = os.environ | {"COVERAGE_FILE": str(folder / "data"), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, "--no-loadscope-reorder", *tests], cwd=ROOT, env=environment).returncode


def _measured(folder: Path) -> dict[str, dict[str, int]]:
    environment, answer = os.environ | {"COVERAGE_FILE": str(folder / "data")}, folder / "coverage.json"
    for words in (["combine", "--quiet"], ["json", "--quiet", "-o", str(answer)]):
        subprocess.run([sys.executable, "-m", "coverage", *words], cwd=ROOT, env=environment, check=True)
    files = json.loads(answer.read_text(encoding="utf-8"))["files"]
    return {path: found["summary"] for path, found in files.items()}


if __name__ == "__main__":
    raise SystemExit(main())
