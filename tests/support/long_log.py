"""A log of any size on disk, written as it is made: the lines of a simulated run, numbered on and on."""

from __future__ import annotations

import re
from pathlib import Path

from dflash.config import TrainConfig
from dflash.health.detectors.schedule import scheduled_lr
from tests.support.log_simulator import log_lines, simulate_run

_LEARNING, _PERIOD = 2000, 4000
_SAMPLES, _SCATTER = 2**25, 0x9E3779B1  # an odd factor modulo a power of two: every sample once, in no order
_NUMBERED = re.compile(
    rb'"(step|batch_id|plan_position)":\d+|"(wall_time_s|mono_time_s)":[\d.e+]+|"rows":\[[\d,]*\]|"target_depths":\[[\d,]*\]'
)


def write_long_log(path: Path, *, size_bytes: int) -> int:
    """Write a healthy run of at least `size_bytes`; returns its records.

    The first steps fall as a run's do; then the settled ones come again and again under new numbers, samples and times.
    """
    train = TrainConfig(schedule="constant")
    records = simulate_run(seed=3, steps=_LEARNING + _PERIOD, lr=lambda step: scheduled_lr(train, step, total=10**9))
    lines = [line for line in log_lines(records).splitlines(keepends=True) if b'"kind":"step"' in line]
    templates = [_NUMBERED.sub(_named, line.replace(b"%", b"%%")) for line in lines]
    step = 0
    with path.open("wb") as file:
        while file.tell() < size_bytes:
            for template in templates if step == 0 else templates[_LEARNING:]:
                rows = b",".join(b"%d" % (row * _SCATTER % _SAMPLES) for row in range(8 * step, 8 * step + 8))
                file.write(template % {b"step": step, b"time": 1.7e9 + 0.2 * step, b"rows": rows})
                step += 1
    return step


def _named(match: re.Match[bytes]) -> bytes:
    name = match.group(0)[1:].partition(b'"')[0]
    if name == b"rows":
        return b'"rows":[%(rows)b]'
    if name == b"target_depths":
        return b'"target_depths":[%(step)d]'
    return b'"%b":%%(time).1f' % name if name.endswith(b"time_s") else b'"%b":%%(step)d' % name
