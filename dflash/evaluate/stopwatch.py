"""Where a decoding loop's time goes, without stopping the device for it.

On a GPU the stages are events in its queue, read once at the end; on a CPU the wall clock is read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Seconds spent in named stages.

    Args:
        device: where the stages' work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Around one piece of a stage's work."""
        if self._device.type == "cuda":
            make_event: Any = torch.cuda.Event
            begin, end = (make_event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
        else:
            begin_s = time.perf_counter()
            yield
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begin_s

    def seconds(self, name: str) -> float:
        """Total of a stage so far; waits for the device."""
        if self._events:
            torch.cuda.synchronize(self._device)
            for stage, begin, end in self._events:
                self._seconds[stage] = self._seconds.get(stage, 0.0) + begin.elapsed_time(end) / 1e3
            self._events.clear()
        return self._seconds.get(name, 0.0)

    def now_s(self) -> float:
        """Clock reading after everything queued on the device has run."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class SharedTime:
    """Seconds of each row of a batch: what passes is divided equally among the rows that it served, so they add up to the batch.

    Args:
        watch: read only when rows end, because reading waits for the device.
        stages: whose seconds are divided likewise.
    """

    def __init__(self, watch: Stopwatch, *, stages: Sequence[str]) -> None:
        self._watch, self._stages = watch, tuple(stages)
        self._charged: dict[int, list[float]] = {}
        self._last = self._reading()

    def charge(self, rows: Sequence[int]) -> None:
        """Divide what has passed since the last call among these rows."""
        now = self._reading()
        shares = [(new - old) / len(rows) for new, old in zip(now, self._last, strict=True)]
        for row in rows:
            charged = self._charged.setdefault(row, [0.0] * len(now))
            self._charged[row] = [have + share for have, share in zip(charged, shares, strict=True)]
        self._last = now

    def skip(self) -> None:
        """What has passed since the last call belongs to no row."""
        self._last = self._reading()

    def of(self, row: int) -> list[float]:
        """A row's seconds: all of them, then those of each stage."""
        return self._charged[row]

    def _reading(self) -> list[float]:
        return [self._watch.now_s(), *(self._watch.seconds(stage) for stage in self._stages)]
