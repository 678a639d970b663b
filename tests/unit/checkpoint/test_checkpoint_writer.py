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
from dflash.errors import CheckpointError
from tests.support.checkpoints import IDENTITY, ignore, state_at, tensors_at


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

    def on_event(self, name: str, step: int, details: Mapping[str, Any]) -> None:
        self.events.append((name, step))
        self.details.append(details)

    def on_operation(self, name: str) -> None:
        self.operations.append(name)
        if self.error is not None and name == "optimizer":
            raise self.error
        if name == self.hold_at:
            self.held.set()
            assert self.release.wait(30)

    def names(self) -> list[str]:
        return [name for name, _ in self.events]


@contextmanager
def writer(directory: Path, watcher: Watcher) -> Iterator[tuple[CheckpointWriter, dict[str, torch.Tensor]]]:
    weights, moments = tensors_at(0)
    hooks = WriterHooks(
        before_commit=lambda: watcher.operations.append("log synced"),
        on_event=watcher.on_event,
        on_defect=watcher.defects.append,
        on_operation=watcher.on_operation,
    )
    made = CheckpointWriter(directory, identity=IDENTITY, drafter=weights, optimizer=moments, hooks=hooks)
    try:
        yield made, weights
    finally:
        watcher.release.set()
        made.close()


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


def test_a_defect_of_the_thread_reaches_the_replica(tmp_path: Path) -> None:
    defect = RuntimeError("a programming error")
    watcher = Watcher(error=defect)
    with writer(tmp_path, watcher) as (made, _), pytest.raises(CheckpointError):
        made.save(state_at(1), wait=True)
    assert watcher.defects == [defect]
    assert ignore("x") is None
