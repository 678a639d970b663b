"""Where a decoding loop's time goes, without stopping the device for it.

On a GPU the stages are events in its queue, read once at the end; on a CPU the wall clock is read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
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
