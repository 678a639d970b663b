"""What reading a run's log costs the health check, against decoding the same bytes into typed records and nothing else.

Two logs of a simulated run: a cold one read from its beginning, and one that has just grown by 1000 records, checked with
the state loaded and saved as between two checks of a live run (pictures not drawn). All are measured alternately.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.report import benchmark_parser, publish
from dflash.config import Config, parse_config
from dflash.health import HealthChecker, check_run, read_new, start_cursor
from dflash.health.detectors.schedule import scheduled_lr
from dflash.health.run import BLOCK_BYTES
from dflash.records import RunPaths, StepRecord
from tests.support.log_simulator import START_S, log_lines, simulate_run

NAME = "health_cost"
NEW_RECORDS = 1000
CONFIG = "target: {mask_token_id: 1}\ndata: {num_conversations: 10}\nhealth: {report_interval_s: 1.0e9}\n"


def main() -> int:
    """Run the benchmark; see `--help`."""
    arguments = benchmark_parser(__doc__ or "").parse_args()
    steps, rounds = (3000, 5) if arguments.quick else (20_000, 15)
    config = parse_config(CONFIG, origin=NAME)
    records = simulate_run(seed=1, steps=steps, lr=lambda step: scheduled_lr(config.train, step, total=steps))
    log = b"".join(line for line in log_lines(records).splitlines(keepends=True) if b'"kind":"step"' in line)
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder))
        paths.log.write_bytes(log)
        seconds = _measure(paths, config, log=log, rounds=rounds)
        state_bytes = (paths.health_dir / "state.json").stat().st_size
    publish(NAME, _figures(seconds, steps=steps, log_bytes=len(log), state_bytes=state_bytes), arguments)
    return 0


def _measure(paths: RunPaths, config: Config, *, log: bytes, rounds: int) -> dict[str, list[float]]:
    start = len(log) - sum(len(line) for line in log.splitlines(keepends=True)[-NEW_RECORDS:])
    seconds: dict[str, list[float]] = {}

    def grow() -> None:
        """The state as it was before the last records were written."""
        (paths.health_dir / "state.json").write_bytes(before)

    paths.log.write_bytes(log[:start])
    _check(paths, config)  # draws the page once and leaves the state
    before = (paths.health_dir / "state.json").read_bytes()
    paths.log.write_bytes(log)
    tests: dict[str, tuple[Callable[[], None], Callable[[], object]]] = {
        "raw_typed": (_nothing, lambda: _raw(log)),
        "cold": (_nothing, lambda: _cold(paths, config)),
        "new_records": (grow, lambda: _check(paths, config)),
        "nothing_new": (_nothing, lambda: _check(paths, config)),
        "raw_new_records": (_nothing, lambda: _raw(log[start:])),
        "stdlib_json": (_nothing, lambda: [json.loads(line) for line in log.splitlines()]),
    }
    for _ in range(rounds):
        for name, (prepare, run) in tests.items():
            prepare()
            began = time.perf_counter()
            run()
            seconds.setdefault(name, []).append(time.perf_counter() - began)
    return seconds


def _nothing() -> None:
    """Nothing to prepare."""


def _raw(log: bytes) -> list[StepRecord]:
    return msgspec.json.Decoder(StepRecord).decode_lines(log)


def _cold(paths: RunPaths, config: Config) -> None:
    checker, cursor = HealthChecker(config.health, config.train, config.checkpoint), start_cursor()
    while True:
        result = read_new(paths.log, cursor, max_bytes=BLOCK_BYTES)
        checker.feed(result.items)
        cursor = result.cursor
        if not result.more:
            return


def _check(paths: RunPaths, config: Config) -> None:
    check_run(paths, config, now_s=START_S, ended=False, remedy=lambda _damage: None)


def _figures(seconds: dict[str, list[float]], *, steps: int, log_bytes: int, state_bytes: int) -> dict[str, Any]:
    def ratio(over: str, under: str) -> list[float]:
        return [a / b for a, b in zip(seconds[over], seconds[under], strict=True)]

    figures: dict[str, Any] = {
        "records": steps,
        "log_bytes": log_bytes,
        "bytes_per_record": round(log_bytes / steps),
        "state_bytes": state_bytes,
        "cold_records_per_s": round(steps / statistics.median(seconds["cold"])),
    }
    for name, values in seconds.items():
        figures |= _spread(f"{name}_ms", [1000 * value for value in values])
    figures |= _spread("cold_vs_raw_typed", ratio("cold", "raw_typed"))
    figures |= _spread("cold_vs_stdlib_json", ratio("cold", "stdlib_json"))
    figures |= _spread("new_records_vs_raw_typed", ratio("new_records", "raw_new_records"))
    return figures


def _spread(name: str, values: list[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {name: round(middle, 3), f"{name}_quartiles": [round(low, 3), round(high, 3)]}


if __name__ == "__main__":
    raise SystemExit(main())
