"""Progress of a run from the tail of its log: cheap enough for every tick, whatever the log's size."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.records import RunPaths
from dflash.train.follow import parse_lines

_TAIL_BYTES = 128 << 10
"""A few dozen step records: a smooth rate, read in well under a millisecond."""


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """Where a training stands.

    Attributes:
        step: optimizer steps done; total_steps: 0 until the trainer has started.
        ce, accepted_length, tokens_per_s: means over the newest records; None without any.
        eta_s: seconds left at the newest rate; None without any.

    """

    step: int
    total_steps: int
    ce: float | None
    accepted_length: float | None
    tokens_per_s: float | None
    eta_s: float | None


def read_account(paths: RunPaths) -> tuple[dict[str, float], str]:
    """What a finished training said about its stages.

    Returns:
        Busy share of each stage, and which side set the pace; empty before the training has finished.
    """
    finished = [item["details"] for item in parse_lines(_tail(paths.log)) if item.get("event") == "finish"]
    if not finished:
        return {}, ""
    stages = finished[-1].get("stages", {})
    return {stage: shares["busy_frac"] for stage, shares in stages.items()}, finished[-1].get("advice", "")


def read_progress(paths: RunPaths) -> TrainProgress:
    """Read where the run stands; a log that has not changed is not read again."""
    try:
        about = paths.log.stat()
    except FileNotFoundError:
        return _progress_of(paths, ())
    return _progress_of(paths, (about.st_ino, about.st_size, about.st_mtime_ns))


@functools.lru_cache(maxsize=4)
def _progress_of(paths: RunPaths, _version: tuple[int, ...]) -> TrainProgress:
    items = list(parse_lines(_tail(paths.log)))
    total_steps = _total_steps(items)
    if total_steps is None:
        total_steps = _total_steps(list(parse_lines(_head(paths.log)))) or 0
    steps = _newest_records(items)
    if not steps:
        resumed = [item["step"] for item in items if item.get("event") == "resume"]
        return TrainProgress(resumed[-1] if resumed else 0, total_steps, None, None, None, None)
    done = int(steps[-1]["step"]) + 1
    seconds = sum(item["step_time_s"] for item in steps)
    ces = [item["ce"] for item in steps if item["ce"] is not None]
    return TrainProgress(
        step=done,
        total_steps=total_steps,
        ce=sum(ces) / len(ces) if ces else None,
        accepted_length=sum(item["accepted_length"] for item in steps) / len(steps),
        tokens_per_s=sum(item["tokens_per_s"] * item["step_time_s"] for item in steps) / seconds,
        eta_s=max(0, total_steps - done) * seconds / len(steps),
    )


def newest_segment(paths: RunPaths) -> int:
    """Number of the segment that the log ends in; 0 without any."""
    return max((item["segment"] for item in newest_lines(paths) if isinstance(item.get("segment"), int)), default=0)


def newest_lines(paths: RunPaths) -> Iterator[dict[str, Any]]:
    """Objects of the log's last lines, a few dozen; none without a log."""
    return parse_lines(_tail(paths.log))


def _newest_records(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Step records of the newest segment."""
    steps = [item for item in items if item.get("kind") == "step"]
    newest = max((item["segment"] for item in items if "segment" in item), default=None)
    return [item for item in steps if item["segment"] == newest]


def _total_steps(items: list[dict[str, Any]]) -> int | None:
    found = [item["details"]["total_steps"] for item in items if item.get("event") in ("start", "resume")]
    return int(found[-1]) if found else None


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            size_bytes = file.seek(0, os.SEEK_END)
            start = max(0, size_bytes - _TAIL_BYTES)
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return b""
    # A tail that starts inside a line starts after it, and one that ends inside a line ends before it.
    first = data.find(b"\n") + 1 if start else 0
    return data[first : data.rfind(b"\n") + 1]


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_TAIL_BYTES)
    except FileNotFoundError:
        return b""
    return data[: data.rfind(b"\n") + 1]
