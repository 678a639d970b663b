"""The health check of a log of 2 GB, in a process of its own: its memory does not know how long the log is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.long_log import write_long_log

ROOT = Path(__file__).parents[2]


def peak_bytes(log: Path, *, size_bytes: int) -> int:
    records = write_long_log(log, size_bytes=size_bytes)
    command = [sys.executable, "-m", "benchmarks.health_speed", "--peak", str(log)]
    answer = subprocess.run(command, capture_output=True, check=True, text=True, cwd=ROOT)
    told = json.loads(answer.stdout.splitlines()[-1])
    assert told["records"] == records
    return int(told["peak_bytes"])


@pytest.mark.slow
@pytest.mark.full
def test_two_gigabytes_are_judged_in_150_megabytes(tmp_path: Path) -> None:
    assert peak_bytes(tmp_path / "train_log.jsonl", size_bytes=2 * 10**9) < 150 * 10**6
