from __future__ import annotations

import hashlib
import os
import stat
import threading
from pathlib import Path

import pytest

from dflash.errors import StorageError
from dflash.storage import (
    atomic_write_bytes,
    atomic_write_text,
    create_exclusively,
    fsync_dir,
    get_bytes,
    open_binary,
    put_file,
    read_chunks,
    sha256_file,
)


def test_atomic_write_replaces_content_and_leaves_no_temporary_behind(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    atomic_write_text(file, "old")
    atomic_write_text(file, "née")
    assert file.read_bytes() == "née".encode()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failing_write_keeps_the_old_content_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    file = tmp_path / "a.json"
    atomic_write_text(file, "old")

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((os, "fsync") if broken == "fsync" else (Path, "replace")), fail)
    with pytest.raises(StorageError, match="No space left"):
        atomic_write_text(file, "new")
    monkeypatch.undo()
    assert file.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_content_is_synced_before_the_rename_and_the_folder_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        order.append("dir" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        real_fsync(descriptor)

    def replace(self: Path, target: Path) -> Path:
        order.append("rename")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    atomic_write_bytes(tmp_path / "a", b"x")
    assert order == ["file", "rename", "dir"]


def test_writing_into_a_missing_folder_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"missing/a\.json"):
        atomic_write_text(tmp_path / "missing" / "a.json", "x")


def test_create_exclusively_lets_exactly_one_of_many_threads_win(tmp_path: Path) -> None:
    file = tmp_path / "key.json"
    barrier = threading.Barrier(8)
    winners: list[int] = []

    def create(number: int) -> None:
        barrier.wait()
        if create_exclusively(file, str(number).encode()):
            winners.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(winners) == 1
    assert file.read_text() == str(winners[0])
    assert [entry.name for entry in tmp_path.iterdir()] == ["key.json"]


def test_a_missing_file_is_a_storage_error_everywhere(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    for read in (lambda: get_bytes(missing), lambda: list(read_chunks(missing)), lambda: sha256_file(missing)):
        with pytest.raises(StorageError, match="none"):
            read()
    with pytest.raises(StorageError):
        put_file(missing, tmp_path / "copy", only_if_absent=False)
    assert not (tmp_path / "copy").exists()


def test_sha256_equals_hashlib(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(bytes(range(256)) * 5000)
    assert sha256_file(file) == hashlib.sha256(file.read_bytes()).hexdigest()
    fsync_dir(tmp_path)


def test_put_file_copies_and_respects_only_if_absent(tmp_path: Path) -> None:
    source, copy = tmp_path / "a", tmp_path / "b"
    source.write_bytes(b"1")
    assert put_file(source, f"file://{copy}", only_if_absent=True)
    source.write_bytes(b"2")
    assert not put_file(source, copy, only_if_absent=True)
    assert copy.read_bytes() == b"1"
    assert put_file(source, copy, only_if_absent=False)
    assert copy.read_bytes() == b"2"


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(StorageError, match="gs"):
        get_bytes("gs://bucket/key")


@pytest.mark.parametrize("uri", ["s3://bucket", "s3://bucket/", "s3:///key"])
def test_an_s3_uri_needs_bucket_and_key(uri: str) -> None:
    with pytest.raises(StorageError, match="bucket or a key"):
        get_bytes(uri)


def test_a_folder_is_no_file_and_the_remedy_is_a_pattern(tmp_path: Path) -> None:
    for read in (lambda: list(read_chunks(tmp_path)), lambda: open_binary(tmp_path)):
        with pytest.raises(StorageError, match=f"cannot read {tmp_path}: Is a directory") as caught:
            read()
        assert f"{tmp_path}/*" in caught.value.remedy
