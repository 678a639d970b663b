"""The writer's thread: one save in flight, snapshots that later updates do not touch, failures that do not stop training."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.checkpoint import CheckpointWriter, WriterHooks, list_checkpoints, load_checkpoint
from dflash.checkpoint.write_times import WriteTimes
from dflash.config import CheckpointConfig
from dflash.errors import CheckpointError
from dflash.train.run_log import RunLog
from tests.support.checkpoints import IDENTITY, ignore, state_at, tensors_at
from tests.support.full_disk import full_disk
from tests.unit.train.test_train_run_log import record


@dataclass
class Watcher:
    """Records events; can hold the writer at an operation or let it fail there."""

    events: list[tuple[str, int]] = field(default_factory=list)
    details: list[Mapping[str, Any]] = field(default_factory=list)
    defects: list[BaseException] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)
    hold_at: str | None = None
    held: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def on_event(self, name: str, step: int, details: Mapping[str, Any]) -> None:
        with self.changed:
            self.events.append((name, step))
            self.details.append(details)
            self.changed.notify_all()

    def on_operation(self, name: str) -> None:
        self.operations.append(name)
        if self.error is not None and name == "optimizer":
            raise self.error
        if name == self.hold_at:
            self.held.set()
            assert self.release.wait(30)

    def seen(self, name: str, step: int) -> Mapping[str, Any]:
        """Details of an event, as soon as it comes."""
        with self.changed:
            assert self.changed.wait_for(lambda: (name, step) in self.events, 30), self.events
            return self.details[self.events.index((name, step))]

    def names(self) -> list[str]:
        return [name for name, _ in self.events]


RULE = CheckpointConfig()


@contextmanager
def writer(
    directory: Path, watcher: Watcher, rule: CheckpointConfig = RULE
) -> Iterator[tuple[CheckpointWriter, dict[str, torch.Tensor]]]:
    weights, moments = tensors_at(0)
    hooks = WriterHooks(
        before_snapshot=lambda: None,
        whole=lambda tensor: tensor,
        before_commit=lambda: watcher.operations.append("log synced"),
        on_event=watcher.on_event,
        on_defect=watcher.defects.append,
        on_operation=watcher.on_operation,
    )
    made = CheckpointWriter(directory, identity=IDENTITY, drafter=weights, optimizer=moments, rule=rule, hooks=hooks)
    try:
        yield made, weights
    finally:
        watcher.release.set()
        made.close()


def wait_to_be_tried_again(made: CheckpointWriter) -> bool:
    """The event of a failure comes a moment before the write that failed only waits."""
    with made._changed:
        return made._changed.wait_for(lambda: made._current is not None and made._current.retrying, timeout=30)


def test_a_waiting_save_is_durable_when_it_returns_and_the_log_went_first(tmp_path: Path) -> None:
    watcher = Watcher()
    with writer(tmp_path, watcher) as (made, _):
        assert made.save(state_at(3), wait=True)
        assert load_checkpoint(tmp_path / "step-3").state == state_at(3)
    assert watcher.names() == ["save_begin", "save_staged", "save_durable"]
    assert watcher.operations[0] == "log synced"
    assert watcher.details[1]["bytes"] == made.buffer_bytes
    assert watcher.details[2]["finite"] is True


def test_updates_after_the_snapshot_do_not_reach_the_checkpoint(tmp_path: Path) -> None:
    watcher = Watcher(hold_at="prepare")
    with writer(tmp_path, watcher) as (made, weights):
        before = weights["fc.weight"].clone()
        assert made.save(state_at(1), wait=False)
        assert watcher.held.wait(30)
        weights["fc.weight"].add_(1)
        watcher.release.set()
        assert made.save(state_at(2), wait=True)
    assert torch.equal(load_checkpoint(tmp_path / "step-1").drafter["fc.weight"], before)
    assert torch.equal(load_checkpoint(tmp_path / "step-2").drafter["fc.weight"], before + 1)


def test_a_save_during_another_is_skipped_and_reported_never_queued(tmp_path: Path) -> None:
    watcher = Watcher(hold_at="manifest")
    with writer(tmp_path, watcher) as (made, _):
        assert made.save(state_at(1), wait=False)
        assert watcher.held.wait(30)
        assert not made.save(state_at(2), wait=False)
        assert not made.save(state_at(3), wait=False)
    assert list_checkpoints(tmp_path) == [1]
    assert watcher.events[2:4] == [("save_skipped", 2), ("save_skipped", 3)]
    assert watcher.details[2] == {"in_flight_step": 1}


def test_a_waiting_save_of_the_step_in_flight_does_not_write_it_twice(tmp_path: Path) -> None:
    watcher = Watcher()
    with writer(tmp_path, watcher) as (made, _):
        made.save(state_at(1), wait=False)
        assert made.save(state_at(1), wait=True)
        assert made.save(state_at(1), wait=True)
    assert watcher.names().count("save_durable") == 1


def test_a_full_disk_fails_the_save_and_not_the_training(tmp_path: Path) -> None:
    watcher = Watcher(error=OSError(28, "No space left on device"))
    with writer(tmp_path, watcher) as (made, _):
        with pytest.raises(CheckpointError, match=r"step-1 could not be written.*No space left"):
            made.save(state_at(1), wait=True)
        assert watcher.names()[-1] == "save_failed"
        assert list_checkpoints(tmp_path) == []
        watcher.error = None
        assert made.save(state_at(1), wait=True)
    assert list_checkpoints(tmp_path) == [1]
    assert not watcher.defects


def test_a_write_that_failed_is_tried_again_from_its_snapshot_until_there_is_room(tmp_path: Path) -> None:
    watcher = Watcher()
    with writer(tmp_path, watcher, CheckpointConfig(retry_s=0.002)) as (made, weights):
        before = weights["fc.weight"].clone()
        with full_disk(limit_bytes=150):
            assert made.save(state_at(1), wait=False)
            assert watcher.seen("save_failed", 1)["retry_in_s"] == 0.002
            weights["fc.weight"].add_(1)
        assert watcher.seen("save_durable", 1)["finite"] is True
        assert torch.equal(load_checkpoint(tmp_path / "step-1").drafter["fc.weight"], before)
    assert not watcher.defects


def test_a_failed_write_leaves_nothing_on_the_full_disk_and_a_newer_save_takes_its_place(tmp_path: Path) -> None:
    watcher = Watcher()
    with writer(tmp_path, watcher, CheckpointConfig(retry_s=1000)) as (made, _):
        with full_disk(limit_bytes=150):
            made.save(state_at(1), wait=False)
            watcher.seen("save_failed", 1)
            assert list(tmp_path.iterdir()) == []
        assert wait_to_be_tried_again(made)
        assert made.save(state_at(2), wait=False)
        watcher.seen("save_durable", 2)
    assert list_checkpoints(tmp_path) == [2]
    assert "save_skipped" not in watcher.names()


def test_closing_gives_a_write_up_that_only_waits_to_be_tried_again(tmp_path: Path) -> None:
    watcher = Watcher()
    with writer(tmp_path, watcher, CheckpointConfig(retry_s=1000)) as (made, _), full_disk(limit_bytes=150):
        made.save(state_at(1), wait=False)
        watcher.seen("save_failed", 1)
    assert list_checkpoints(tmp_path) == []


@contextmanager
def failing_while_waited_for(made: CheckpointWriter, watcher: Watcher) -> Iterator[None]:
    """The held write fails once the block waits for it: only then the lock is free, and not before the block has begun."""

    def let_it_fail() -> None:
        with made._changed:
            watcher.error, watcher.hold_at = OSError("no space left"), None
            watcher.release.set()

    assert watcher.held.wait(30)
    thread = threading.Thread(target=let_it_fail)
    with made._changed:
        thread.start()
        yield
    thread.join()


SLOW_RETRY = CheckpointConfig(retry_s=1000, hung_min_s=0, hung_max_s=20)


def test_closing_waits_for_no_second_attempt_of_a_write_that_fails_meanwhile(tmp_path: Path) -> None:
    watcher = Watcher(hold_at="drafter")
    with writer(tmp_path, watcher, SLOW_RETRY) as (made, _):
        made.save(state_at(1), wait=False)
        with failing_while_waited_for(made, watcher):
            made.close()
    assert watcher.names().count("save_failed") == 1, "it failed; it did not hang"


def test_the_last_save_follows_at_once_on_one_that_fails_meanwhile(tmp_path: Path) -> None:
    watcher = Watcher(hold_at="drafter")
    with writer(tmp_path, watcher, SLOW_RETRY) as (made, _):
        made.save(state_at(1), wait=False)
        with failing_while_waited_for(made, watcher), pytest.raises(CheckpointError, match="no space left"):
            made.save(state_at(2), wait=True)
        watcher.error = None
        assert made.save(state_at(2), wait=True)
    assert [watcher.details[n].get("hung") for n, name in enumerate(watcher.names()) if name == "save_failed"] == [False, False]


HUNG_AT_ONCE = CheckpointConfig(hung_min_s=0, hung_max_s=1e-9)


def test_a_hanging_write_is_reported_and_left_behind_and_never_appears(tmp_path: Path) -> None:
    watcher = Watcher(hold_at="optimizer")
    with writer(tmp_path, watcher, HUNG_AT_ONCE) as (made, weights):
        made.save(state_at(1), wait=False)
        assert watcher.held.wait(30)
        watcher.hold_at = None
        weights["fc.weight"].add_(1)
        assert made.save(state_at(2), wait=False)
        assert watcher.seen("save_failed", 1)["hung"] is True
        watcher.seen("save_durable", 2)
        watcher.release.set()
        assert torch.equal(load_checkpoint(tmp_path / "step-2").drafter["fc.weight"], weights["fc.weight"])
        for thread in threading.enumerate():
            if thread.name == "checkpoint-1":
                thread.join(30)
    assert list_checkpoints(tmp_path) == [2]
    assert not watcher.defects


def test_no_second_write_is_left_behind_while_the_first_still_hangs(tmp_path: Path) -> None:
    watcher = Watcher(hold_at="optimizer")
    with writer(tmp_path, watcher, HUNG_AT_ONCE) as (made, _):
        made.save(state_at(1), wait=False)
        assert watcher.held.wait(30)
        watcher.held.clear()
        assert made.save(state_at(2), wait=False)
        assert watcher.held.wait(30)
        assert not made.save(state_at(3), wait=False)
        with pytest.raises(CheckpointError, match="an earlier write hangs"):
            made.save(state_at(3), wait=True)
    assert {1, 2} <= {step for name, step in watcher.events if name == "save_failed"}


def test_a_last_save_that_does_not_fit_the_time_left_is_not_begun(tmp_path: Path) -> None:
    watcher = Watcher()
    with writer(tmp_path, watcher) as (made, _):
        assert made.save_within(state_at(1), budget_s=30), "nothing is known of this disk: it is tried"
        assert made.save_within(state_at(1), budget_s=0), "it is durable already"
        assert not made.save_within(state_at(2), budget_s=0)
        details = watcher.seen("save_skipped", 2)
        assert (details["reason"], details["durable_step"]) == ("does not fit", 1)
    assert list_checkpoints(tmp_path) == [1]


def test_a_last_save_that_takes_longer_than_thought_is_left_at_the_deadline(tmp_path: Path) -> None:
    watcher = Watcher(hold_at="optimizer")
    with writer(tmp_path, watcher) as (made, _):
        assert not made.save_within(state_at(1), budget_s=0.01)
        assert watcher.seen("save_failed", 1)["hung"] is False
    assert list_checkpoints(tmp_path) == []


def test_steps_are_logged_on_time_while_a_write_takes_for_ever(tmp_path: Path) -> None:
    watcher = Watcher(hold_at="drafter")
    defects: list[BaseException] = []
    log = RunLog(tmp_path / "log.jsonl", segment=0, capacity_records=8, heartbeat_s=60, on_defect=defects.append)
    with writer(tmp_path / "checkpoints", watcher) as (made, _):
        made.save(state_at(1), wait=False)
        assert watcher.held.wait(30)
        for step in range(100):
            log.step(record(step))
            log.sync()
            assert len((tmp_path / "log.jsonl").read_bytes().splitlines()) == step + 1
        assert watcher.names() == ["save_begin", "save_staged"]
    log.close()
    assert not defects
    assert list_checkpoints(tmp_path / "checkpoints") == [1]


def test_what_counts_as_hung_and_what_fits() -> None:
    times = WriteTimes(CheckpointConfig(hung_factor=10, hung_min_s=60, hung_max_s=600))
    assert (times.limit_s, times.usual_s) == (600, None)
    assert times.fits(0.1, in_flight_s=None)
    for write_s in (1, 20, 2):
        times.note(write_s)
    assert (times.limit_s, times.usual_s) == (60, 2)
    assert times.fits(2.5, in_flight_s=None)
    assert not times.fits(2.4, in_flight_s=None)
    assert times.fits(3.5, in_flight_s=1.5)
    assert not times.fits(3.4, in_flight_s=1.5)
    assert times.fits(2.5, in_flight_s=99)
    for _ in range(4):
        times.note(20)
    assert times.limit_s == 200
    for _ in range(20):
        times.note(100)
    assert times.limit_s == 600


def test_a_defect_of_the_thread_reaches_the_replica(tmp_path: Path) -> None:
    defect = RuntimeError("a programming error")
    watcher = Watcher(error=defect)
    with writer(tmp_path, watcher) as (made, _), pytest.raises(CheckpointError):
        made.save(state_at(1), wait=True)
    assert watcher.defects == [defect]
    assert ignore("x") is None
