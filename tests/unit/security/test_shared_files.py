"""Files where other users can write, and rights of what is written: nothing of ours is opened, cut or run through them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dflash.checkpoint import LATEST, point_to
from dflash.config import ClusterConfig
from dflash.errors import DeviceError
from dflash.storage import append_line, atomic_write_text, create_exclusively, open_store
from dflash.train.device_lock import LOCK_DIR_VARIABLE, hold_devices
from tests.support.checkpoints import save_at

GPU = ClusterConfig(device="cuda")


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine's folder of device locks."""
    folder = tmp_path / "locks"
    folder.mkdir()
    monkeypatch.setenv(LOCK_DIR_VARIABLE, str(folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return folder


@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "pipe", "folder"])
def test_what_somebody_has_planted_in_place_of_a_lock_is_refused_and_not_touched(kind: str, locks: Path, tmp_path: Path) -> None:
    mine, lock = tmp_path / "mine", locks / "0.lock"
    mine.write_text("precious")
    mine.chmod(0o600)
    if kind == "symbolic link":
        lock.symlink_to(mine)
    elif kind == "hard link":
        lock.hardlink_to(mine)
    elif kind == "pipe":
        os.mkfifo(lock)
    else:
        lock.mkdir()
    with pytest.raises(DeviceError, match="somebody has put there"), hold_devices(GPU, run="r"):
        pass
    assert mine.read_text() == "precious"
    assert stat.S_IMODE(mine.stat().st_mode) == 0o600


def test_a_link_that_leads_nowhere_creates_nothing(locks: Path, tmp_path: Path) -> None:
    (locks / "0.lock").symlink_to(tmp_path / "new")
    with pytest.raises(DeviceError, match="somebody has put there"), hold_devices(GPU, run="r"):
        pass
    assert not (tmp_path / "new").exists()


def test_an_ordinary_lock_still_holds(locks: Path) -> None:
    for _ in range(2):
        with hold_devices(GPU, run="first"):
            assert (locks / "0.lock").is_file()
            with pytest.raises(DeviceError, match="another training"), hold_devices(GPU, run="second"):
                pass


def test_nothing_that_is_written_can_be_run_or_changed_by_others(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        atomic_write_text(tmp_path / "a", "x")
        append_line(tmp_path / "b", "x")
        create_exclusively(tmp_path / "c", b"x")
        open_store(tmp_path / "store").put("d", b"x", only_if_absent=True)
        save_at(tmp_path, 4)
        point_to(tmp_path, LATEST, 4)
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 9
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o644}
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert all(not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH) for path in folders)


def test_a_closed_umask_closes_the_folders(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        open_store(tmp_path / "store").put("deep/d", b"x", only_if_absent=True)
        (tmp_path / "run").mkdir()
        save_at(tmp_path / "run", 4)
    finally:
        os.umask(before)
    for folder in (tmp_path / "store", tmp_path / "run", tmp_path / "run" / "step-4"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
