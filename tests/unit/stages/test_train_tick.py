"""When the supervisor's own health check acts: only after the checkpoints were judged with the damage known."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash.stages import train
from dflash.train.progress import TrainProgress


class Checks:
    """Health checks by a script: whether each one would decide something, and whether it was allowed to act."""

    def __init__(self, *damaged: bool) -> None:
        self.damaged = list(damaged)
        self.acted: list[bool] = []

    def stage(self, _root: Path, *, act: bool, ended: bool | None) -> Any:
        self.acted.append(act)
        decision = object() if self.damaged.pop(0) else None
        return SimpleNamespace(decision=decision, verdict="healthy", headline="")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def make(checks: Checks, *, interval_s: float) -> Any:
        monkeypatch.setattr(train, "health_stage", checks.stage)
        monkeypatch.setattr(train, "read_progress", lambda _paths: TrainProgress(0, 0, None, None, None, None))
        monkeypatch.setattr(train, "critical_spans", lambda _paths: ((5, 9),) if checks.damaged and checks.damaged[0] else ())
        config = SimpleNamespace(health=SimpleNamespace(check_interval_s=interval_s))
        run = SimpleNamespace(config=config, paths=SimpleNamespace(root=tmp_path))
        idle = SimpleNamespace(forward=lambda: None, tick=lambda: None)
        return train._Tick(run, idle, lambda _progress: None, idle)  # type: ignore[arg-type]

    return make


def test_what_is_seen_for_the_first_time_waits_for_one_tick(made: Any) -> None:
    checks = Checks(False, True, True, False)
    tick = made(checks, interval_s=0.0)
    for _ in range(4):
        tick()
    assert checks.acted == [False, False, True, False]


def test_damage_that_the_evidence_shows_is_acted_on_at_once(made: Any) -> None:
    checks = Checks(True, False)
    tick = made(checks, interval_s=1e9)
    assert tick.look() == ((5, 9),)
    tick()
    assert checks.acted == [True]
    tick()
    assert checks.acted == [True], "nothing is due"


def test_without_damage_nothing_is_checked_before_its_time(made: Any) -> None:
    checks = Checks(False)
    tick = made(checks, interval_s=1e9)
    assert tick.look() == ()
    tick()
    assert checks.acted == []
