"""A rollback on real folders, ended between any two of its actions and taken up by the next supervisor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash.checkpoint import list_checkpoints, read_ledger
from dflash.config import CheckpointConfig, RollbackConfig
from dflash.records import ControlRequest, EventRecord, LrOverlay, RollbackEntry, RollbackPlan, RunPaths, to_json
from dflash.rollback import overlay_in_force, skips_in_force
from dflash.rollback.execution import Action
from dflash.train import go_back as room
from dflash.train.book import CheckpointBook
from dflash.train.go_back import Rollbacks
from dflash.train.requests import pending_requests
from tests.support.checkpoints import save_at
from tests.support.trainer_process import log_lines

RULE = CheckpointConfig(interval_steps=10, window_steps=10, soak_steps=10)
PLAN = RollbackPlan(
    key="segment-0-k", action="rollback", rung=2, segment=0, onset_step=33, alarm_step=38, region_step=33, target_step=20,
    skip=((60, 78),), overlay=LrOverlay(from_step=20, rewarm_from=0.1, rewarm_steps=20, cap=1.0), reason="loss exploded",
)  # fmt: skip


def nothing() -> None:
    """No checkpoint became clean meanwhile."""


class DiedError(Exception):
    """The supervisor is gone."""


def open_book(paths: RunPaths) -> CheckpointBook:
    return CheckpointBook(paths, RULE, RollbackConfig())


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run with checkpoints at 0, 10, 20 (clean) and 30, 40 (in probation), and a request to go back to 20."""
    run = RunPaths(tmp_path / "run-001")
    run.requests_dir.mkdir(parents=True)
    run.checkpoints_dir.mkdir()
    for step in range(0, 50, 10):
        save_at(run.checkpoints_dir, step)
    book = open_book(run)
    book.reconcile()
    for step in (0, 10, 20):
        book.note(step, 0, "clean", "test")
    request = ControlRequest(PLAN.key, "rollback", PLAN.reason, "2026-01-01", "test", plan=PLAN)
    (run.requests_dir / f"{PLAN.key}.json").write_text(to_json(request))
    return run


def rollbacks_of(paths: RunPaths, monkeypatch: pytest.MonkeyPatch | None = None, *, die_after: int | None = None) -> Rollbacks:
    book = open_book(paths)
    rollbacks = Rollbacks(paths, book, newest_segment=lambda: book.last_segment)
    if monkeypatch is not None and die_after is not None:
        perform, done = rollbacks._perform, [0]

        def limited(action: Action) -> None:
            if done[0] == die_after:
                raise DiedError
            done[0] += 1
            perform(action)

        monkeypatch.setattr(rollbacks, "_perform", limited)
    return rollbacks


def outcome(paths: RunPaths) -> dict[str, Any]:
    """Everything that must not depend on who died when."""
    lines = read_ledger(paths.ledger)
    rolled = [(line.phase, line.plan, line.target_step, line.next_segment) for line in lines if isinstance(line, RollbackEntry)]
    states = {line.step: (line.segment, line.state) for line in lines if not isinstance(line, RollbackEntry)}
    return {
        "rolled": rolled,
        "states": states,
        "checkpoints": list_checkpoints(paths.checkpoints_dir),
        "aside": sorted(path.name for path in (paths.checkpoints_dir / "aside").iterdir()),
        "pending": pending_requests(paths),
        "skips": skips_in_force(lines),
        "overlay": overlay_in_force(lines),
    }


def test_the_run_is_back_at_the_clean_checkpoint_and_everything_later_is_kept_aside(paths: RunPaths) -> None:
    stopped: list[str] = []
    rollbacks = rollbacks_of(paths)
    assert rollbacks.settle(stop_trainer=lambda: stopped.append("now"), learn=nothing)
    assert stopped == ["now"]
    seen = outcome(paths)
    assert seen["checkpoints"] == [0, 10, 20]
    assert seen["aside"] == ["step-30.segment-0", "step-40.segment-0"]
    assert [(phase, target, segment) for phase, _, target, segment in seen["rolled"]] == [("begin", 20, None), ("end", 20, 1)]
    assert (seen["skips"], seen["overlay"], seen["pending"]) == (((60, 78),), PLAN.overlay, [])
    assert rollbacks.done() == 1
    assert not rollbacks.pending()
    begin, end = log_lines(paths)
    assert (begin["event"], begin["segment"], begin["step"]) == ("rollback_begin", 0, 38)
    assert (end["event"], end["segment"], end["step"]) == ("rollback_end", 1, 20)
    assert (end["details"]["skipped"], end["details"]["overlay"]["rewarm_steps"]) == ([[60, 78]], 20)


def test_what_became_clean_since_the_decision_is_noted_first_and_gone_back_to(paths: RunPaths) -> None:
    """A scheduled check reads the ledger while the supervisor is about to learn that one more soak is over."""
    decided = replace(PLAN, rung=1, overlay=None, target_step=10)
    (paths.requests_dir / f"{PLAN.key}.json").write_text(
        to_json(ControlRequest(PLAN.key, "rollback", PLAN.reason, "2026-01-01", "test", plan=decided))
    )
    book = open_book(paths)
    rollbacks = Rollbacks(paths, book, newest_segment=lambda: book.last_segment)
    learned: list[int] = []

    def learn() -> None:
        learned.append(30)
        book.note(30, 0, "clean", "its soak is over")

    rollbacks.settle(stop_trainer=None, learn=learn)
    seen = outcome(paths)
    assert learned == [30], "once"
    assert [(phase, target) for phase, _, target, _ in seen["rolled"]] == [("begin", 30), ("end", 30)]
    assert seen["checkpoints"] == [0, 10, 20, 30]


@pytest.mark.parametrize("die_after", range(8))
def test_a_supervisor_that_dies_in_between_is_continued(
    paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, die_after: int
) -> None:
    with pytest.raises(DiedError):
        rollbacks_of(paths, monkeypatch, die_after=die_after).settle(stop_trainer=lambda: None, learn=nothing)
    rollbacks_of(paths).settle(stop_trainer=None, learn=nothing)
    seen = outcome(paths)
    assert [(phase, target, segment) for phase, _, target, segment in seen["rolled"]] == [("begin", 20, None), ("end", 20, 1)]
    assert seen["checkpoints"] == [0, 10, 20]
    assert seen["aside"] == ["step-30.segment-0", "step-40.segment-0"]
    assert {step: state for step, (_, state) in seen["states"].items()} == {
        0: "clean",
        10: "clean",
        20: "clean",
        30: "bad",
        40: "bad",
    }
    assert seen["pending"] == []


@pytest.mark.parametrize("told", [0, 1], ids=["nothing told", "half told"])
def test_a_return_that_its_supervisor_could_not_tell_the_log_is_told_by_the_next_one(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, told: int
) -> None:
    stock, calls = room.append_event, [0]

    def dies(path: Path, event: EventRecord) -> None:
        if calls[0] == told:
            raise DiedError
        calls[0] += 1
        stock(path, event)

    with monkeypatch.context() as patched:
        patched.setattr(room, "append_event", dies)
        with pytest.raises(DiedError):
            rollbacks_of(paths).settle(stop_trainer=None, learn=nothing)
    for _ in range(2):
        rollbacks_of(paths).settle(stop_trainer=None, learn=nothing)
    assert [(line["event"], line["segment"], line["step"]) for line in log_lines(paths)] == [
        ("rollback_begin", 0, 38), ("rollback_end", 1, 20)
    ]  # fmt: skip
    assert [phase for phase, *_ in outcome(paths)["rolled"]] == ["begin", "end"]


def test_a_rotten_target_is_marked_and_an_older_one_taken(paths: RunPaths) -> None:
    weights = paths.checkpoint(20) / "drafter.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00")
    rollbacks_of(paths).settle(stop_trainer=None, learn=nothing)
    seen = outcome(paths)
    assert seen["rolled"][-1][2] == 10
    assert seen["states"][20] == (0, "bad")
    assert seen["checkpoints"] == [0, 10]
    assert seen["overlay"].from_step == 10


def test_progress_past_the_region_lets_the_abandoned_ones_go(paths: RunPaths) -> None:
    rollbacks_of(paths).settle(stop_trainer=None, learn=nothing)
    book = CheckpointBook(paths, RULE, RollbackConfig(region_steps=5))
    book.prune(spare=())
    assert (paths.checkpoints_dir / "aside").is_dir()
    save_at(paths.checkpoints_dir, 50, segment=1)
    book.reconcile()
    book.note(50, 1, "clean", "test")
    book.prune(spare=())
    assert not (paths.checkpoints_dir / "aside").exists()


def test_a_halt_is_noted_once_and_remembered(paths: RunPaths) -> None:
    for file in paths.requests_dir.iterdir():
        file.unlink()
    halt = RollbackPlan(**{**{name: getattr(PLAN, name) for name in PLAN.__slots__}, "action": "halt", "skip": (), "overlay": None})
    request = ControlRequest(halt.key, "halt", halt.reason, "2026-01-01", "test", plan=halt)
    (paths.requests_dir / f"{halt.key}.json").write_text(to_json(request))
    rollbacks = rollbacks_of(paths)
    rollbacks.settle(stop_trainer=None, learn=nothing)
    assert rollbacks.halt() == halt
    again = rollbacks_of(paths)
    assert not again.pending()
    assert again.halt() == halt
    assert list_checkpoints(paths.checkpoints_dir) == [0, 10, 20, 30, 40]


def test_retention_is_no_faster_than_a_request(paths: RunPaths) -> None:
    """Training goes on between a scheduled check's decision and the supervisor that reads it: newer checkpoints become clean."""
    rule = CheckpointConfig(interval_steps=10, window_steps=10, soak_steps=10, keep_clean=1, keep_other=0)
    book = CheckpointBook(paths, rule, RollbackConfig())
    for step in (30, 40):
        book.note(step, 0, "clean", "test")
    waiting = Rollbacks(paths, book, newest_segment=lambda: book.last_segment)
    assert waiting.targets() == {20}
    book.prune(spare=waiting.targets())
    assert list_checkpoints(paths.checkpoints_dir) == [0, 20, 40]
    waiting.settle(stop_trainer=lambda: None, learn=nothing)
    assert outcome(paths)["rolled"][-1][2] == 20
    assert waiting.targets() == frozenset()
