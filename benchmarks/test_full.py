"""The release test: every test with `DFLASH_FULL=1`, thousands of histories and schedules, sixty kills, a soak; at most two hours.

Each integration test file and each folder of unit tests is a part with a pytest process of its own, three at a time. A part's
outcome is appended to `<work>/parts.jsonl` at once, so an interrupted release test goes on where it was: what has passed runs again
only if the code, what tests share, or the part itself has changed. The stored result names the revision and every failure.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, benchmark_parser, kept_lines, publish
from dflash.storage import append_line

NAME = "test_full"
LANES = 3
LIMIT_S = 3600
SCALE = {"DFLASH_FULL": "1", "DFLASH_ROLLBACK_HISTORIES": "4000", "DFLASH_SCHEDULES": "40000"}
QUICK_PART = "tests/unit/rollback"
CODE = (
    "dflash",
    "tasks",
    "flows",
    "prefect_dflash",
    "configs",
    "infra",
    "release",
    "constraints.txt",
    "requirements.lock",
    "benchmarks/**/*.py",
    "prefect.yaml",
    "prefect.toml",
    "pyproject.toml",
)
SHARED = ("tests/support", "tests/fixtures", "tests/**/conftest.py")
PAGES = ("docs", "*.md", "LICENSE", "Makefile", ".ci", "tests/run", "benchmarks/results")
"""What tests of the project itself read beside the code; integration tests read none of it."""
COUNTS = ("tests", "failures", "errors", "skipped")


def main() -> int:
    """Run what is missing; see `--help`."""
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "test-full", help="where outcomes are kept")
    parser.add_argument("--lanes", type=int, default=LANES, help="pytest processes at once")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to be tested")
    parser.add_argument("--only", nargs="+", metavar="PART", help="some parts, e.g. tests/unit/rollback; the result names them")
    arguments = parser.parse_args()
    wanted = arguments.only or ([QUICK_PART] if arguments.quick else parts(arguments.root))
    rows = release_test(arguments.root, wanted, work=arguments.work, lanes=arguments.lanes, scale={} if arguments.quick else SCALE)
    of = len(parts(arguments.root))
    publish(NAME, figures(rows, revision=revision(arguments.root), of=of), arguments)
    return 0 if all(row["ok"] for row in rows) else 1


def parts(root: Path) -> list[str]:
    """What is tested by one process each, those that take long first."""
    tests = root / "tests"
    found = [
        *sorted(tests.glob("integration/test_*.py")),
        tests / "flows",
        *sorted(folder for folder in tests.glob("unit/*") if folder.is_dir() and folder.name != "__pycache__"),
        *sorted(tests.glob("unit/test_*.py")),
        *sorted(tests.glob("test_*.py")),
    ]
    return [str(path.relative_to(root)) for path in found if path.exists()]


def release_test(root: Path, wanted: Sequence[str], *, work: Path, lanes: int, scale: Mapping[str, str]) -> list[dict[str, Any]]:
    """Run the parts that have not passed yet, several at once.

    Args:
        root: checkout.
        wanted: parts.
        work: folder of the outcomes.
        lanes: processes at once.
        scale: environment that makes the tests long.

    Returns:
        One outcome for each part.
    """
    work.mkdir(parents=True, exist_ok=True)
    store, keys = work / "parts.jsonl", {part: part_key(root, part) for part in wanted}
    passed = {row["part"]: row for row in kept_lines(store) if row["key"] == keys.get(row["part"]) and row["ok"]}
    rows = [passed[part] for part in wanted if part in passed]
    with ThreadPoolExecutor(lanes) as pool:
        running = [pool.submit(run_part, root, part, work=work, scale=scale) for part in wanted if part not in passed]
        for future in as_completed(running):
            found = future.result()
            row = {"key": keys[found["part"]], **found}
            append_line(store, json.dumps(row))
            rows.append(row)
            state = "ok" if row["ok"] else f"FAILED (code {row['code']})"
            print(f"{row['part']:<52} {row['tests']:>5} tests {row['seconds']:>7.0f} s  {state}", file=sys.stderr, flush=True)
    return rows


def run_part(root: Path, part: str, *, work: Path, scale: Mapping[str, str]) -> dict[str, Any]:
    """Run one part to its end.

    Returns:
        Its name, exit code, counts, the names of failed tests, seconds, Unix time of the end; its output is beside, in a file.
    """
    stem = part.replace("/", "-").removesuffix(".py")
    xml, output = work / f"{stem}.xml", work / f"{stem}.txt"
    xml.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--timeout={LIMIT_S}", f"--junitxml={xml}", part]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), **scale}
    began = time.monotonic()
    with output.open("wb") as file:
        code = subprocess.run(command, cwd=root, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    ended_at, seconds = time.time(), time.monotonic() - began
    counts, failed = read_junit(xml) if xml.is_file() else (dict.fromkeys(COUNTS, 0), [])
    return {"part": part, "ok": code == 0, "code": code, "ended_at": ended_at, "seconds": seconds, "failed": failed, **counts}


def read_junit(file: Path) -> tuple[dict[str, int], list[str]]:
    """Counts of a pytest report, and which tests failed."""
    suite = next(ET.parse(file).getroot().iter("testsuite"))  # noqa: S314 - written by the pytest that was just run
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {count: int(suite.get(count, 0)) for count in COUNTS}, failed


def figures(rows: Iterable[Mapping[str, Any]], *, revision: str, of: int) -> dict[str, Any]:
    """What the stored result says: outcomes of some or all `of` parts."""
    rows = sorted(rows, key=lambda row: -row["seconds"])
    total = {count: sum(row[count] for row in rows) for count in COUNTS}
    failed = [name for row in rows for name in row["failed"]]
    failed += [f"{row['part']} ended with code {row['code']}" for row in rows if not row["ok"]]
    each = {row["part"]: f"{row['tests']} tests, {row['seconds']:.0f} s" for row in rows}
    return {
        "revision": revision,
        "parts": f"{len(rows)} of {of}",
        "passed": total["tests"] - total["failures"] - total["errors"] - total["skipped"],
        "skipped": total["skipped"],
        "failed": ", ".join(failed) or "none",
        "wall_minutes": round(covered_s((row["ended_at"] - row["seconds"], row["ended_at"]) for row in rows) / 60, 1),
        "process_minutes": round(sum(row["seconds"] for row in rows) / 60, 1),
        "each": each,
    }


def covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans (begin, end) lasted: pauses between interrupted runs do not count."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def part_key(root: Path, part: str) -> str:
    """Identity of everything that a part's outcome may depend on."""
    digest = hashlib.sha256()
    for pattern in (*CODE, *SHARED, *(() if part.startswith("tests/integration/") else PAGES), part):
        for file in sorted(path for top in root.glob(pattern) for path in ([top] if top.is_file() else top.rglob("*"))):
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(f"{file.relative_to(root)}\0".encode())
                digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def revision(root: Path) -> str:
    """The commit that was tested."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "not a git checkout"


if __name__ == "__main__":
    sys.exit(main())
