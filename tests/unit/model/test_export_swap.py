"""Replacing a folder: never a moment without one, and a killed replacement loses nothing."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from dflash.model import export_swap
from dflash.model.export_swap import exchange, partial_path, recover, replace_folder

DEAD_PID = 2**22 + 1
"""Above the largest process id that Linux gives."""


def folder(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "file").write_text(content)
    return path


def test_a_new_folder_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    final = tmp_path / "final"
    for content in ("one", "two"):
        replace_folder(folder(tmp_path / "new", content), final)
        assert (final / "file").read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_without_the_systems_exchange_two_renames_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_swap, "exchange", lambda _first, _second: False)
    final = folder(tmp_path / "final", "one")
    replace_folder(folder(tmp_path / "new", "two"), final)
    assert (final / "file").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_a_reader_finds_a_complete_folder_at_every_moment(tmp_path: Path) -> None:
    final = folder(tmp_path / "final", "0")
    if not exchange(folder(tmp_path / "a", "a"), folder(tmp_path / "b", "b")):
        pytest.skip("this file system cannot exchange names")
    stop, missing = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            if not final.exists():  # the folder's own name; a file below it may belong to the folder that is just going
                missing.append(True)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(200):
        replace_folder(folder(tmp_path / "new", str(number)), final)
    stop.set()
    reader.join()
    assert not missing


def test_a_killed_replacement_is_undone_by_the_next_one(tmp_path: Path) -> None:
    final = tmp_path / "final"
    folder(tmp_path / "final.replaced", "old")
    recover(final)
    assert (final / "file").read_text() == "old"
    folder(tmp_path / "final.replaced", "older")
    recover(final)
    assert (final / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_half_built_folders_of_dead_writers_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    folder(tmp_path / f"final.partial-{DEAD_PID}", "half")
    living = folder(partial_path(tmp_path / "final"), "half")
    recover(tmp_path / "final")
    assert [path.name for path in tmp_path.iterdir()] == [living.name]
    assert living.name.endswith(str(os.getpid()))


def test_an_exchange_with_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nothing"):
        exchange(folder(tmp_path / "there", "x"), tmp_path / "nothing")
