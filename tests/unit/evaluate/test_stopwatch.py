from __future__ import annotations

import time

import pytest
import torch

from dflash.evaluate.stopwatch import Stopwatch


def test_stages_add_up_and_unknown_ones_took_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 10.0, 12.5, 20.0, 20.25])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    watch = Stopwatch(torch.device("cpu"))
    for stage in ("target", "target", "drafter"):
        with watch.stage(stage):
            pass
    assert watch.seconds("target") == 3.5 and watch.seconds("drafter") == 0.25
    assert watch.seconds("nobody") == 0.0


def test_on_a_gpu_the_stages_are_events_read_once_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[object] = []

    class Event:
        """A clock of the device: each record is one tick of 2 ms."""

        ticks = 0

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            Event.ticks += 1
            self.tick = Event.ticks

        def elapsed_time(self, other: Event) -> float:
            return 2.0 * (other.tick - self.tick)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    watch = Stopwatch(torch.device("cuda", 0))
    for _ in range(3):
        with watch.stage("target"):
            pass
    assert waits == []
    assert watch.seconds("target") == pytest.approx(0.006) and len(waits) == 1
    assert watch.seconds("target") == pytest.approx(0.006) and len(waits) == 1
