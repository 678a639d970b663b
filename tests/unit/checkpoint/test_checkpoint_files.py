"""Durable writing and verified loading."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash.checkpoint import (
    LATEST,
    list_checkpoints,
    load_checkpoint,
    newest_durable,
    read_manifest,
    read_pointer,
    read_state,
    remove_checkpoint,
    remove_leftovers,
    save_checkpoint,
    verify_checkpoint,
)
from dflash.checkpoint.tensors import global_norm, write_tensors
from dflash.errors import CheckpointError
from tests.support.checkpoints import content_at, entry, ignore, save_at, state_at, tensors_at

FILES = ("drafter.safetensors", "optimizer.safetensors", "trainer.json", "manifest.json")


class Died(BaseException):
    """Stands for SIGKILL: nothing in the code under test may catch it and go on."""


def test_what_is_saved_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    manifest = save_at(tmp_path, 7, segment=2)
    loaded = load_checkpoint(tmp_path / "step-7")
    weights, moments = tensors_at(7)
    assert loaded.manifest == manifest == verify_checkpoint(tmp_path / "step-7")
    assert loaded.state == state_at(7, segment=2) == read_state(tmp_path / "step-7")
    for saved, live in ((loaded.drafter, weights), (loaded.optimizer, moments)):
        assert saved.keys() == live.keys()
        assert all(torch.equal(saved[name], live[name]) and saved[name].dtype == live[name].dtype for name in live)
    assert sorted(path.name for path in (tmp_path / "step-7").iterdir()) == sorted(FILES)
    assert read_pointer(tmp_path, LATEST) == 7


def test_the_streaming_writer_writes_what_the_safetensors_library_reads(tmp_path: Path) -> None:
    tensors = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "ints": torch.arange(7),
        "flags": torch.tensor([True, False]),
        "big": torch.randn(1 << 18),
    }
    written = write_tensors(tmp_path / "x.safetensors", tensors)
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    data = (tmp_path / "x.safetensors").read_bytes()
    assert (written.size_bytes, written.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert (int.from_bytes(data[:8], "little") + 8) % 8 == 0


def test_the_manifest_tells_finite_weights_from_others(tmp_path: Path) -> None:
    assert save_at(tmp_path, 1).finite
    for number, bad in enumerate((math.nan, math.inf), start=2):
        content = content_at(number)
        moments = {**content.optimizer, "fc.weight.exp_avg": torch.tensor([1.0, bad])}
        broken = dataclasses.replace(content, optimizer=moments)
        manifest = save_checkpoint(tmp_path, broken, created_at="now", on_operation=ignore)
        assert not manifest.finite
        assert not verify_checkpoint(tmp_path / f"step-{number}").finite
    weights, _ = tensors_at(1)
    flat = torch.cat([tensor.flatten() for tensor in weights.values()]).double()
    assert global_norm(weights) == pytest.approx(float(flat.norm()))
    nan_weights = dataclasses.replace(content_at(9), drafter={"w": torch.tensor([math.nan])})
    assert save_checkpoint(tmp_path, nan_weights, created_at="now", on_operation=ignore).weights_norm == -1.0


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_anywhere_is_refused(tmp_path: Path, name: str) -> None:
    save_at(tmp_path, 3)
    file = tmp_path / "step-3" / name
    original = file.read_bytes()
    for position in range(0, len(original), max(1, len(original) // 40)):
        data = bytearray(original)
        data[position] ^= 0x10
        file.write_bytes(data)
        if name != "manifest.json":
            with pytest.raises(CheckpointError, match=name):
                load_checkpoint(tmp_path / "step-3")
            continue
        # Text of the manifest that does not describe the files may change unnoticed; nothing it protects may.
        with contextlib.suppress(CheckpointError):
            assert torch.equal(load_checkpoint(tmp_path / "step-3").drafter["fc.weight"], tensors_at(3)[0]["fc.weight"])


@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_shortened_file_is_refused_with_its_name(tmp_path: Path, name: str) -> None:
    save_at(tmp_path, 3)
    file = tmp_path / "step-3" / name
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="bytes, its manifest says" if name != "manifest.json" else "damaged"):
        verify_checkpoint(tmp_path / "step-3")
    file.unlink()
    with pytest.raises(CheckpointError, match="manifest" if name == "manifest.json" else name):
        load_checkpoint(tmp_path / "step-3")


def test_a_manifest_of_another_version_or_naming_foreign_files_is_refused(tmp_path: Path) -> None:
    save_at(tmp_path, 3)
    file = tmp_path / "step-3" / "manifest.json"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps(manifest | {"schema_version": 99}))
    with pytest.raises(CheckpointError, match="schema version 99"):
        read_manifest(tmp_path / "step-3")
    files = [*manifest["files"], {"name": "../../secret", "size_bytes": 1, "sha256": "0"}]
    file.write_text(json.dumps(manifest | {"files": files}))
    with pytest.raises(CheckpointError, match="outside"):
        verify_checkpoint(tmp_path / "step-3")
    file.write_text(json.dumps(manifest | {"files": manifest["files"][:2]}))
    with pytest.raises(CheckpointError, match=r"trainer\.json"):
        verify_checkpoint(tmp_path / "step-3")


def test_a_renamed_folder_does_not_pass_for_another_step(tmp_path: Path) -> None:
    save_at(tmp_path, 3)
    (tmp_path / "step-3").rename(tmp_path / "step-5")
    with pytest.raises(CheckpointError, match="state of step 3"):
        verify_checkpoint(tmp_path / "step-5")


def operations_of(directory: Path, step: int) -> list[str]:
    names: list[str] = []
    save_checkpoint(directory, content_at(step), created_at="now", on_operation=names.append)
    return names


def test_dying_between_any_two_file_operations_keeps_a_verified_newest(tmp_path: Path) -> None:
    names = operations_of(tmp_path / "probe", 4)
    assert len(names) == len(set(names)) >= 9
    for dying in range(len(names) + 1):
        directory = tmp_path / f"die-{dying}"
        save_at(directory, 2)
        seen: list[str] = []

        def die(name: str, seen: list[str] = seen, dying: int = dying) -> None:
            if len(seen) == dying:
                raise Died
            seen.append(name)

        if dying < len(names):
            with pytest.raises(Died):
                save_checkpoint(directory, content_at(4), created_at="now", on_operation=die)
        else:
            save_checkpoint(directory, content_at(4), created_at="now", on_operation=die)
        committed = "rename" in seen
        newest = newest_durable(directory, {})
        assert newest == (4 if committed else 2)
        assert load_checkpoint(directory / f"step-{newest}").state == state_at(newest)
        # The next process cleans up and saves the same step as if nothing had been.
        remove_leftovers(directory)
        assert sorted(path.name for path in directory.iterdir() if path.is_dir()) == (
            ["step-2", "step-4"] if committed else ["step-2"]
        )
        save_at(directory, 4, segment=1)
        assert load_checkpoint(directory / "step-4").state == state_at(4, segment=1)


def test_nothing_unsynced_is_ever_under_a_final_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut may lose whatever was not synced: truncate exactly that, at every point, and look again."""
    synced: set[int] = set()
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", fsync)
    names = operations_of(tmp_path / "probe", 4)
    for dying in range(1, len(names)):
        directory = tmp_path / f"cut-{dying}"
        save_at(directory, 2)
        seen: list[str] = []

        def die(name: str, seen: list[str] = seen, dying: int = dying) -> None:
            if len(seen) == dying:
                raise Died
            seen.append(name)

        with pytest.raises(Died):
            save_checkpoint(directory, content_at(4), created_at="now", on_operation=die)
        for file in directory.rglob("*"):
            if file.is_file() and file.stat().st_ino not in synced:
                file.write_bytes(b"")
        newest = newest_durable(directory, {})
        assert newest is not None
        verify_checkpoint(directory / f"step-{newest}")


def test_a_condemned_step_is_replaced_by_the_new_one(tmp_path: Path) -> None:
    save_at(tmp_path, 2)
    save_at(tmp_path, 4)
    (tmp_path / "step-4" / "drafter.safetensors").write_bytes(b"broken")
    assert newest_durable(tmp_path, {4: entry(4, "bad")}) == 2
    save_at(tmp_path, 4, segment=1)
    assert verify_checkpoint(tmp_path / "step-4").segment == 1
    assert list_checkpoints(tmp_path) == [2, 4]
    assert remove_leftovers(tmp_path) == []


def test_listing_ignores_everything_that_is_not_a_complete_checkpoint(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "none") == []
    assert newest_durable(tmp_path, {}) is None
    save_at(tmp_path, 0)
    save_at(tmp_path, 10)
    for name in ("step-7.tmp", "step-8.old", "step-007", "step-", "other", "step-9"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-7.tmp" / "manifest.json").write_text("{}")
    assert list_checkpoints(tmp_path) == [0, 10]
    assert remove_leftovers(tmp_path) == ["step-7.tmp", "step-8.old"]


def test_a_deletion_cut_short_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_at(tmp_path, 1)
    save_at(tmp_path, 2)

    def die(_path: Path) -> None:
        raise Died

    monkeypatch.setattr("dflash.checkpoint.remove.shutil.rmtree", die)
    with pytest.raises(Died):
        remove_checkpoint(tmp_path, 1)
    monkeypatch.undo()
    assert list_checkpoints(tmp_path) == [2]
    assert remove_leftovers(tmp_path) == ["step-1.deleted"]
    remove_checkpoint(tmp_path, 1)
    remove_checkpoint(tmp_path, 2)
    assert list_checkpoints(tmp_path) == []


def test_a_pointer_that_is_missing_or_nonsense_points_nowhere(tmp_path: Path) -> None:
    assert read_pointer(tmp_path, LATEST) is None
    (tmp_path / LATEST).write_text("../../etc\n")
    assert read_pointer(tmp_path, LATEST) is None
