"""Copies of checkpoints in a store: complete or absent, continued after a kill, verified on the way back."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from dflash.checkpoint import list_checkpoints, load_checkpoint
from dflash.checkpoint.remote import (
    RemoteCopy,
    copies_to_delete,
    delete_copy,
    list_copies,
    live_copies,
    restore_copy,
    upload_checkpoint,
)
from dflash.errors import CheckpointError
from dflash.records import RollbackEntry, RollbackPlan
from dflash.storage import LocalStore, open_store
from tests.support.checkpoints import ignore, save_at

OBJECTS = ["drafter.safetensors", "optimizer.safetensors", "trainer.json", "manifest.json"]


@pytest.fixture
def local(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoints"
    save_at(directory, 10)
    return directory


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def test_a_copy_is_listed_when_it_is_complete_and_comes_back_as_it_was(local: Path, store: LocalStore, tmp_path: Path) -> None:
    order: list[str] = []

    def on_object(name: str) -> None:
        order.append(name)
        assert list_copies(store) == []

    copy = upload_checkpoint(store, local / "step-10", on_object=on_object)
    assert order == OBJECTS
    assert list_copies(store) == [copy] == [RemoteCopy(10, 0)]
    manifest = restore_copy(store, copy, tmp_path / "back")
    assert manifest.step == 10
    back, own = load_checkpoint(tmp_path / "back" / "step-10"), load_checkpoint(local / "step-10")
    assert back.state == own.state
    assert back.manifest == own.manifest
    with pytest.raises(CheckpointError, match="exists already"):
        restore_copy(store, copy, tmp_path / "back")


def die_at(number: int, folder: Path, location: Path) -> None:
    sent = 0

    def on_object(_name: str) -> None:
        nonlocal sent
        if sent == number:
            os.kill(os.getpid(), signal.SIGKILL)
        sent += 1

    upload_checkpoint(open_store(location), folder, on_object=on_object)


@pytest.mark.parametrize("number", range(len(OBJECTS)))
def test_an_upload_killed_anywhere_shows_nothing_and_sends_only_the_rest(
    local: Path, store: LocalStore, tmp_path: Path, number: int
) -> None:
    process = multiprocessing.get_context("fork").Process(target=die_at, args=(number, local / "step-10", tmp_path / "store"))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert list_copies(store) == []
    sent: list[str] = []
    copy = upload_checkpoint(store, local / "step-10", on_object=sent.append)
    assert sent == OBJECTS[number:]
    assert restore_copy(store, copy, tmp_path / "back").step == 10
    again: list[str] = []
    upload_checkpoint(store, local / "step-10", on_object=again.append)
    assert again == ["manifest.json"], "a complete copy is not sent again; its manifest is only offered"


def test_the_same_step_of_a_later_segment_is_another_copy(local: Path, store: LocalStore) -> None:
    upload_checkpoint(store, local / "step-10", on_object=ignore)
    save_at(local, 10, segment=2)
    upload_checkpoint(store, local / "step-10", on_object=ignore)
    assert list_copies(store) == [RemoteCopy(10, 0), RemoteCopy(10, 2)]
    assert max(list_copies(store)) == RemoteCopy(10, 2), "the newest is the one that training went on from"


@pytest.mark.parametrize("name", OBJECTS)
def test_a_damaged_copy_is_refused_and_leaves_nothing_under_its_name(
    local: Path, store: LocalStore, tmp_path: Path, name: str
) -> None:
    copy = upload_checkpoint(store, local / "step-10", on_object=ignore)
    data = bytearray(store.read(copy.prefix + name))
    data[len(data) // 2] ^= 1
    store.put(copy.prefix + name, bytes(data), only_if_absent=False)
    with pytest.raises(CheckpointError):
        restore_copy(store, copy, tmp_path / "back")
    assert list_checkpoints(tmp_path / "back") == []


def test_a_folder_without_a_manifest_is_not_copied(local: Path, store: LocalStore) -> None:
    (local / "step-10" / "manifest.json").unlink()
    with pytest.raises(CheckpointError):
        upload_checkpoint(store, local / "step-10", on_object=ignore)
    assert list(store.names("checkpoints/")) == []


def test_the_newest_copies_and_the_newest_clean_one_stay() -> None:
    copies = [RemoteCopy(step, 0) for step in (10, 20, 30, 40, 50)]

    def doomed(found: list[RemoteCopy], keep: int, clean: list[int]) -> list[RemoteCopy]:
        return copies_to_delete(found, keep=keep, clean=clean, rollbacks=())

    assert doomed(copies, 2, [10, 20]) == [RemoteCopy(10, 0), RemoteCopy(30, 0)]
    assert doomed(copies, 2, []) == copies[:3]
    assert doomed(copies, 9, []) == []
    assert doomed([], 1, [1]) == []


def test_what_a_rollback_abandoned_is_neither_kept_nor_restored() -> None:
    """Its steps are higher than those of the segment that goes on, and where the disk is lost nobody knows that it was damaged."""
    plan = RollbackPlan("k", "rollback", 1, 0, 33, 45, 33, 20, (), None, "why")
    ends = [RollbackEntry("begin", plan, 20, None, 0.0), RollbackEntry("end", plan, 20, 1, 0.0)]
    before = [RemoteCopy(20, 0), RemoteCopy(40, 0), RemoteCopy(50, 0)]
    assert copies_to_delete(before, keep=2, clean=[20], rollbacks=ends) == before[1:]
    assert copies_to_delete(before, keep=2, clean=[20], rollbacks=ends[:1]) == []
    after = [*before, RemoteCopy(30, 1)]
    assert max(after) == RemoteCopy(30, 1)
    assert copies_to_delete(after, keep=1, clean=[20], rollbacks=ends) == before[1:]
    assert live_copies(after) == [RemoteCopy(20, 0), RemoteCopy(30, 1)]
    assert live_copies([RemoteCopy(20, 0), RemoteCopy(30, 0), RemoteCopy(30, 1)]) == [RemoteCopy(20, 0), RemoteCopy(30, 1)]
    assert live_copies([RemoteCopy(50, 1), RemoteCopy(20, 0), RemoteCopy(40, 0)]) == [
        RemoteCopy(20, 0), RemoteCopy(40, 0), RemoteCopy(50, 1)
    ], "a crash goes on where it was"  # fmt: skip


def test_a_deleted_copy_is_gone_to_the_last_object(local: Path, store: LocalStore) -> None:
    copy = upload_checkpoint(store, local / "step-10", on_object=ignore)
    delete_copy(store, copy)
    assert list(store.names("checkpoints/")) == []
