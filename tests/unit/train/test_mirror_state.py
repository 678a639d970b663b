"""Copies of checkpoints where the state of the copying cannot be written down: they are made all the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash.checkpoint.remote import list_copies
from dflash.records import RunPaths
from dflash.storage import open_store
from dflash.train.mirror import Mirror
from tests.support.checkpoints import ignore, save_at


def test_a_state_that_cannot_be_noted_ends_no_copying_and_hides_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths, store = RunPaths(tmp_path / "demo-001"), open_store(tmp_path / "store")
    save_at(paths.checkpoints_dir, 10)
    assert not paths.control_dir.exists(), "so nothing can be written there"
    mirror = Mirror(paths, store, keep=2, on_object=ignore)
    mirror.notice()
    assert mirror.close(timeout_s=30)
    assert [copy.step for copy in list_copies(store)] == [10]
    assert "is not noted" in caplog.text


def test_an_end_without_its_copy_is_told(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "demo-001")
    paths.control_dir.mkdir(parents=True)
    save_at(paths.checkpoints_dir, 10)
    (tmp_path / "store").write_text("no folder")
    mirror = Mirror(paths, open_store(tmp_path / "store"), keep=2, on_object=ignore)
    mirror.notice()
    assert not mirror.close(timeout_s=0)
    assert json.loads((paths.control_dir / "mirror.json").read_text())["error"]
