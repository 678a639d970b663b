"""Checks of the machine: disk, memory, store, clock, sockets; each broken on purpose."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash.config import Config, parse_config
from dflash.errors import DeviceError, StorageError
from dflash.storage import LocalStore
from dflash.train.doctor import machine
from dflash.train.doctor.machine import (
    clock_check,
    judge_clock,
    judge_disk,
    judge_free_memory,
    probe_store,
    sockets_check,
    storage_check,
    store_skew,
)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    text = f"run: {{root: {tmp_path / 'runs'}}}\ntarget: {{mask_token: '<|mask|>'}}\ndata: {{num_conversations: 4}}\n"
    return parse_config(text, origin="test")


def test_a_full_disk_is_found_by_numbers_alone() -> None:
    assert judge_disk("runs", 10_000_000_000, 10_000_000_001, cache_bytes=0).status == "ok"
    with pytest.raises(StorageError, match=r"runs has 9\.9 GB free, checkpoints need 10\.0 GB"):
        judge_disk("runs", 10_000_000_000, 9_900_000_000, cache_bytes=0)


def test_memory_that_others_use_is_a_warning() -> None:
    assert judge_free_memory("GPU", 10**9, None) is None
    assert judge_free_memory("GPU", 10**9, 10**9) is None
    found = judge_free_memory("GPU", 2 * 10**9, 10**9)
    assert found is not None
    assert (found.status, found.message) == ("warn", "GPU needs 2.00 GB, 1.00 GB are free right now")


def test_the_store_is_written_read_and_left_as_it_was(config: Config, tmp_path: Path) -> None:
    result = storage_check(config)
    assert result.status == "ok"
    assert str(tmp_path) in result.message
    assert list(tmp_path.iterdir()) == []


class Broken(LocalStore):
    """A store that breaks one promise."""

    def __init__(self, root: Path, **answers: Callable[..., Any]) -> None:
        super().__init__(root)
        self._answers = answers

    def read(self, name: str) -> bytes:
        data = super().read(name)
        return self._answers["read"](data) if "read" in self._answers else data

    def put(self, name: str, data: bytes, *, only_if_absent: bool) -> bool:
        return super().put(name, data, only_if_absent=only_if_absent and "put" not in self._answers)

    def delete(self, name: str) -> None:
        if "delete" not in self._answers:
            super().delete(name)


@pytest.mark.parametrize(
    ("promise", "message"),
    [("read", "other bytes than were written"), ("put", "must not be replaced"), ("delete", "still lists an object")],
)
def test_a_store_that_breaks_a_promise_is_found(promise: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=message):
        probe_store(Broken(tmp_path, **{promise: lambda data: data[:-1]}))
    assert (promise == "delete") == bool(list(tmp_path.iterdir())), "whatever is found, the probe is removed"


def test_a_folder_that_cannot_be_written_is_found(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    monkeypatch.setattr(machine, "existing_parent", lambda _path: blocked)
    with pytest.raises(StorageError):
        storage_check(config)


def clock(**changes: float | None) -> str:
    readings: dict[str, Any] = {
        "wall_time_s": 1_800_000_000.0,
        "monotonic_step_s": 0.001,
        "file_skew_s": 0.01,
        "store_skew_s": None,
        **changes,
    }
    return judge_clock(readings.pop("wall_time_s"), **readings).status


def test_clocks_are_judged_by_their_readings() -> None:
    assert clock() == clock(store_skew_s=3.0) == "ok"
    assert clock(wall_time_s=0.0) == "fail"
    assert clock(monotonic_step_s=-0.1) == "fail"
    assert clock(file_skew_s=-30.0) == "warn"
    assert clock(store_skew_s=120.0) == "warn"
    assert clock(store_skew_s=-1800.0) == "fail"


def test_this_machines_clock_is_measured_and_no_file_is_left(config: Config, tmp_path: Path) -> None:
    result = clock_check(config)
    assert result.status in ("ok", "warn")
    assert "file" in result.message
    assert list(tmp_path.iterdir()) == []


def test_the_clock_of_a_store_that_does_not_answer_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "DATE_TIMEOUT_S", 0.2)
    assert store_skew("http://127.0.0.1:1") is None
    assert store_skew("no address") is None
    assert store_skew("http://key:secret@store") is None, "what a library says about that address holds the secret"


class Answer:
    """An HTTP answer with a date."""

    def __init__(self, date: str | None) -> None:
        self.headers = {"Date": date}

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""


def test_the_skew_of_a_store_comes_from_its_date(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 600))
    monkeypatch.setattr(machine, "urlopen", lambda *_args, **_kwargs: Answer(ahead))
    skew = store_skew("http://store")
    assert skew is not None
    assert 590 < skew < 610
    for no_date in (None, "yesterday", "Mon, 31 Feb 2026 10:00:00 GMT"):
        monkeypatch.setattr(machine, "urlopen", lambda *_args, date=no_date, **_kwargs: Answer(date))
        assert store_skew("http://store") is None


def test_a_machine_without_sockets_is_found(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sockets_check(config).status == "ok"

    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(machine.socket, "socket", refuse)
    with pytest.raises(DeviceError, match="Too many open files"):
        sockets_check(config)
