"""Do the tests see a fault? Thirty seeded faults, one at a time, in a copy of the checkout; the tests nearest to each must fail.

A fault counts as caught only if its tests passed without it and a test fails with it; a copy whose tests cannot be collected says
nothing and ends the benchmark. Each outcome is appended to `<work>/outcomes.jsonl` at once: interrupted, it goes on where it was
as long as the code is the same. About half a minute a fault on one busy core. `--only WORD` takes the faults of some files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, benchmark_parser, kept_lines, publish
from benchmarks.seeded_faults_list import FAULTS, Fault
from dflash.storage import append_line

NAME = "seeded_faults"
GOAL = 28
COPIED = ("dflash", "tests", "tasks", "flows", "prefect_dflash", "benchmarks", "configs", "infra", "pyproject.toml", "prefect.yaml")
QUICK = 2
LIMIT_S = 900
HANGS_S = 150
"""A test that takes longer has failed: some faults make loops that never end."""
PASSED, FAILED = 0, 1
"""Exit codes of pytest; every other one says that nothing was tested."""


def main() -> int:
    """Try the faults; see `--help`."""
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "seeded-faults", help="where outcomes and the copy are kept")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="faults whose file or name holds one of these words")
    arguments = parser.parse_args()
    words = arguments.only or [""]
    chosen = [fault for fault in FAULTS if any(word in fault.file or word in fault.name for word in words)]
    if arguments.quick:
        chosen = chosen[:QUICK]
    outcomes = list(tried(chosen, work=arguments.work))
    if len(chosen) == len(FAULTS) or arguments.quick:
        publish(NAME, figures(outcomes), arguments)
    missed = [outcome["fault"] for outcome in outcomes if not outcome["caught"]]
    for name in missed:
        print(f"not caught: {name}", file=sys.stderr)
    return 0 if len(missed) <= len(FAULTS) - GOAL else 1


def figures(outcomes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is published."""
    caught = sum(outcome["caught"] for outcome in outcomes)
    missed = [outcome["fault"] for outcome in outcomes if not outcome["caught"]]
    return {
        "faults": len(outcomes),
        "caught": caught,
        "goal": GOAL,
        "not_caught": "; ".join(missed) or "none",
        "cpu_s": round(sum(outcome["cpu_s"] for outcome in outcomes), 1),
    }


def tried(faults: Sequence[Fault], *, work: Path) -> Iterator[dict[str, Any]]:
    """Outcome of every fault, those of an interrupted benchmark of the same code first read back."""
    work.mkdir(parents=True, exist_ok=True)
    copy, log = work / "copy", work / "outcomes.jsonl"
    fresh_copy(copy)
    code = digest_of(copy)
    known = {line["key"]: line for line in kept_lines(log)}
    for fault in faults:
        key = hashlib.sha256(f"{code} {fault}".encode()).hexdigest()
        if key not in known:
            before = _passes_without(fault, copy, code, known, log)
            outcome = {"key": key, "fault": fault.name, "file": fault.file, **try_one(fault, copy)}
            print(f"{'caught' if outcome['caught'] else 'NOT CAUGHT'}: {fault.name} ({before})", file=sys.stderr)
            append(log, outcome, known)
        yield known[key]


def try_one(fault: Fault, copy: Path) -> dict[str, Any]:
    """Put the fault into the copy, run its tests, and take it out again."""
    file = copy / fault.file
    source = file.read_text(encoding="utf-8")
    try:
        file.write_text(with_fault(source, fault), encoding="utf-8")
        code, cpu_s, said = run_tests(fault.tests, copy)
    finally:
        file.write_text(source, encoding="utf-8")
    if code not in (PASSED, FAILED):
        raise SystemExit(f"{fault.name}: pytest ended with {code} and tested nothing:\n{said}")
    return {"caught": code == FAILED, "cpu_s": cpu_s}


def with_fault(source: str, fault: Fault) -> str:
    """The source with the fault in it; `old` must stand there exactly once."""
    found = source.count(fault.old)
    if found != 1:
        raise SystemExit(f"{fault.name}: its text stands {found} times in {fault.file}, expected once: bring the list up to date")
    return source.replace(fault.old, fault.new)


def run_tests(tests: Sequence[str], copy: Path) -> tuple[int, float, str]:
    """Exit code, CPU seconds and the end of the output of the tests in the copy."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "DFLASH_", "PREFECT_", "MLFLOW_"))}
    environment = kept | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copy)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        f"timeout={HANGS_S}",
        *(f"tests/unit/{name}" for name in tests),
    ]
    before = os.times()
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return done.returncode, round(cpu_s, 2), (done.stdout + done.stderr)[-2000:]


def _passes_without(fault: Fault, copy: Path, code: str, known: dict[str, dict[str, Any]], log: Path) -> str:
    """Make sure that the fault's tests pass without it; once for each set of tests."""
    key = hashlib.sha256(f"{code} {fault.tests}".encode()).hexdigest()
    if key not in known:
        ended, cpu_s, said = run_tests(fault.tests, copy)
        if ended != PASSED:
            raise SystemExit(f"{' '.join(fault.tests)} fail without any fault:\n{said}")
        append(log, {"key": key, "tests": list(fault.tests), "cpu_s": cpu_s}, known)
    return f"its tests pass without it in {known[key]['cpu_s']} CPU s"


def fresh_copy(copy: Path) -> None:
    """The checkout's code as it is now, committed or not."""
    if copy.exists():
        shutil.rmtree(copy)
    copy.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "results", "fixtures", "*.pyc", ".local")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=ignored)
        else:
            shutil.copy(source, copy / name)


def digest_of(copy: Path) -> str:
    """Hash of every Python file of the copy."""
    digest = hashlib.sha256()
    for file in sorted(copy.rglob("*.py")):
        digest.update(str(file.relative_to(copy)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def append(log: Path, line: dict[str, Any], known: dict[str, dict[str, Any]]) -> None:
    """Keep an outcome."""
    append_line(log, json.dumps(line))
    known[line["key"]] = line


if __name__ == "__main__":
    sys.exit(main())
