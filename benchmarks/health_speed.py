"""What the health check costs: records judged a second, checks of a growing log, memory at any size, and writing the log.

Two logs of a simulated run: a cold one read from its beginning, and one that has just grown by 1000 records, checked with
the state loaded and saved as between two checks of a live run (pictures not drawn); beside them the same bytes decoded
into typed records and nothing else. All are measured alternately, in processor time. Memory is the peak of a process of
its own that judges a log of 2 GB (64 MB with `--quick`), which is written as it is simulated.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.report import ROOT, benchmark_parser, publish
from dflash.config import Config, parse_config
from dflash.health import HealthChecker, check_run, read_new, start_cursor
from dflash.health.detectors.schedule import scheduled_lr
from dflash.health.run import BLOCK_BYTES, LINE_BYTES
from dflash.records import RunPaths, StepRecord
from dflash.train.run_log import RunLog
from tests.support.log_simulator import START_S, STEP_S, log_lines, simulate_run
from tests.support.long_log import write_long_log

NAME = "health_speed"
NEW_RECORDS = 1000
LARGE_BYTES, QUICK_BYTES = 2 * 10**9, 64 * 10**6
CONFIG = "target: {mask_token_id: 1}\ndata: {num_conversations: 10}\nhealth: {report_interval_s: 1.0e9}\n"


def main() -> int:
    """Run the benchmark; see `--help`."""
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument("--peak", metavar="LOG", help="judge this log and print the peak memory of the process")
    arguments = parser.parse_args()
    config = parse_config(CONFIG, origin=NAME)
    if arguments.peak:
        return _peak(Path(arguments.peak), config)
    steps, rounds = (3000, 5) if arguments.quick else (20_000, 15)
    records = simulate_run(seed=1, steps=steps, lr=lambda step: scheduled_lr(config.train, step, total=steps))
    log = b"".join(line for line in log_lines(records).splitlines(keepends=True) if b'"kind":"step"' in line)
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder))
        paths.log.write_bytes(log)
        seconds = _measure(paths, config, log=log, now_s=START_S + STEP_S * steps, rounds=rounds)
        state_bytes = (paths.health_dir / "state.json").stat().st_size
        figures = _figures(seconds, steps=steps, log_bytes=len(log), state_bytes=state_bytes)
        figures |= _logging([record for record in records if isinstance(record, StepRecord)][:2000], Path(folder) / "own.jsonl")
        figures |= _memory(paths.log, size_bytes=QUICK_BYTES if arguments.quick else LARGE_BYTES)
    publish(NAME, figures, arguments)
    return 0


def _measure(paths: RunPaths, config: Config, *, log: bytes, now_s: float, rounds: int) -> dict[str, list[float]]:
    start = len(log) - sum(len(line) for line in log.splitlines(keepends=True)[-NEW_RECORDS:])
    state, last = paths.health_dir / "state.json", paths.health_dir / "last.json"
    seconds: dict[str, list[float]] = {}

    def grow() -> None:
        """What was known before the last records were written."""
        state.write_bytes(before[0])
        last.write_bytes(before[1])

    paths.log.write_bytes(log[:start])
    _check(paths, config, now_s - STEP_S * NEW_RECORDS)  # draws the page once and leaves the state
    before = state.read_bytes(), last.read_bytes()
    paths.log.write_bytes(log)
    tests: dict[str, tuple[Callable[[], None], Callable[[], object]]] = {
        "raw_typed": (_nothing, lambda: _raw(log)),
        "cold": (_nothing, lambda: _cold(paths.log, config)),
        "new_records": (grow, lambda: _check(paths, config, now_s)),
        "nothing_new": (_nothing, lambda: _check(paths, config, now_s)),
        "raw_new_records": (_nothing, lambda: _raw(log[start:])),
        "stdlib_json": (_nothing, lambda: [json.loads(line) for line in log.splitlines()]),
    }
    for _ in range(rounds):
        for name, (prepare, run) in tests.items():
            prepare()
            began = time.process_time()
            run()
            seconds.setdefault(name, []).append(time.process_time() - began)
    return seconds


def _nothing() -> None:
    """Nothing to prepare."""


def _raw(log: bytes) -> list[StepRecord]:
    return msgspec.json.Decoder(StepRecord).decode_lines(log)


def _cold(log: Path, config: Config) -> int:
    """Judge a log from its beginning; returns its records."""
    checker, cursor = HealthChecker(config.health, config.train, config.checkpoint), start_cursor()
    while True:
        result = read_new(log, cursor, max_bytes=BLOCK_BYTES, max_line_bytes=LINE_BYTES)
        checker.feed(result.items)
        cursor = result.cursor
        if not result.more:
            break
    return checker.report(run=NAME, now_s=START_S, ended=True, remedy=lambda _damage: None).records


def _check(paths: RunPaths, config: Config, now_s: float) -> None:
    check_run(paths, config, now_s=now_s, ended=False, remedy=lambda _damage: None)


def _peak(log: Path, config: Config) -> int:
    began = time.process_time()
    records = _cold(log, config)
    seconds = time.process_time() - began
    # Not getrusage: its peak is inherited from the process that started this one.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak_bytes = 1024 * int(status.partition("VmHWM:")[2].split()[0])
    print(json.dumps({"records": records, "cpu_s": seconds, "peak_bytes": peak_bytes}))
    return 0


def _memory(log: Path, *, size_bytes: int) -> dict[str, Any]:
    write_long_log(log, size_bytes=size_bytes)
    command = [sys.executable, str(ROOT / "benchmarks" / f"{NAME}.py"), "--peak", str(log)]
    answer = subprocess.run(command, capture_output=True, check=True, text=True, cwd=ROOT)
    peak = json.loads(answer.stdout.splitlines()[-1])
    return {
        "large_log_bytes": log.stat().st_size,
        "large_log_records": peak["records"],
        "large_log_records_per_cpu_s": round(peak["records"] / peak["cpu_s"]),
        "large_log_peak_mb": round(peak["peak_bytes"] / 1e6, 1),
    }


def _logging(records: list[StepRecord], file: Path) -> dict[str, Any]:
    """What the training loop waits for each record it logs; the writing is another thread's."""

    def defect(error: BaseException) -> None:
        raise error

    log = RunLog(file, segment=0, capacity_records=len(records), heartbeat_s=60.0, on_defect=defect)
    call_s = []
    for record in records:
        began = time.perf_counter()
        log.step(record)
        call_s.append(time.perf_counter() - began)
        time.sleep(0.001)  # a trainer computes between two records
    log.close()
    return _spread("log_call_us", [1e6 * value for value in call_s])


def _figures(seconds: dict[str, list[float]], *, steps: int, log_bytes: int, state_bytes: int) -> dict[str, Any]:
    def ratio(over: str, under: str) -> list[float]:
        return [a / b for a, b in zip(seconds[over], seconds[under], strict=True)]

    figures: dict[str, Any] = {
        "records": steps,
        "log_bytes": log_bytes,
        "bytes_per_record": round(log_bytes / steps),
        "state_bytes": state_bytes,
        "cold_records_per_cpu_s": round(steps / statistics.median(seconds["cold"])),
    }
    for name, values in seconds.items():
        figures |= _spread(f"{name}_cpu_ms", [1000 * value for value in values])
    figures |= _spread("cold_vs_raw_typed", ratio("cold", "raw_typed"))
    figures |= _spread("cold_vs_stdlib_json", ratio("cold", "stdlib_json"))
    figures |= _spread("new_records_vs_raw_typed", ratio("new_records", "raw_new_records"))
    return figures


def _spread(name: str, values: list[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {name: round(middle, 3), f"{name}_quartiles": [round(low, 3), round(high, 3)]}


if __name__ == "__main__":
    raise SystemExit(main())
