"""A local store keeps the promises that data sets rely on; names never leave a store."""

from __future__ import annotations

import os
import stat
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from botocore.exceptions import EndpointConnectionError
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.errors import StorageError
from dflash.storage import LocalStore, S3Store, Store, open_store, sha256_file, sha256_in_store
from dflash.storage.s3_client import storage_error

NAMES = st.lists(st.text("ab-.", min_size=1, max_size=3).filter(lambda part: part not in (".", "..")), min_size=1, max_size=3).map(
    "/".join
)
BAD_NAMES = ["", "/", "/etc/passwd", "..", "a/../../b", "a/..", "./a", "a//b", "a/", "a\\..\\b", "a\nb", "a\0b"]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "some" / "store")


def test_an_address_says_which_store_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for address in (tmp_path / "x", "x", f"file://{tmp_path}/x", "y/../x"):
        store = open_store(address)
        assert isinstance(store, LocalStore)
        assert store.uri == str(tmp_path / "x")
        assert store.local_root == tmp_path / "x"
    for address in ("s3://bucket/a/b", "s3://bucket/a/b/"):
        remote = open_store(address)
        assert isinstance(remote, S3Store)
        assert remote.uri == "s3://bucket/a/b"
        assert remote.local_root is None
    assert open_store("s3://bucket").uri == "s3://bucket"
    for address, said in (("gs://bucket/a", "unknown scheme 'gs'"), ("s3:///a", "lacks a bucket")):
        with pytest.raises(StorageError, match=said):
            open_store(address)
    assert list(tmp_path.iterdir()) == [], "opening makes nothing"


def test_objects_are_written_read_and_removed(store: Store) -> None:
    assert store.size("a/b") is None
    assert list(store.names("")) == []
    assert store.put("a/b", b"first", only_if_absent=True)
    assert not store.put("a/b", b"second", only_if_absent=True)
    assert store.read("a/b") == b"first"
    assert store.put("a/b", b"0123456789", only_if_absent=False)
    assert store.size("a/b") == 10
    assert store.size("a") is None, "a folder is no object"
    assert store.size("a/b/c") is None
    assert store.read_range("a/b", start=2, length=3) == b"234"
    with pytest.raises(StorageError, match="ends at byte 10, 12 are asked for"):
        store.read_range("a/b", start=9, length=3)
    with store.open("a/b") as file:
        file.seek(-2, os.SEEK_END)
        assert file.read() == b"89"
    store.delete("a/b")
    store.delete("a/b")
    for use in (store.read, store.open):
        with pytest.raises(StorageError, match="a/b"):
            use("a/b")


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("address", ["local", "s3://bucket/prefix"])
def test_names_that_leave_the_store_are_refused(tmp_path: Path, address: str, name: str) -> None:
    store = open_store(tmp_path / "in" if address == "local" else address)
    (tmp_path / "b").write_bytes(b"outside")
    uses: list[Callable[[], object]] = [
        lambda: store.read(name),
        lambda: store.read_range(name, start=0, length=1),
        lambda: store.size(name),
        lambda: store.put(name, b"", only_if_absent=False),
        lambda: store.put_file(name, tmp_path / "b", only_if_absent=False),
        lambda: store.open(name),
        lambda: store.delete(name),
    ]
    for use in uses:
        with pytest.raises(StorageError, match="is no name inside"):
            use()
    for prefix in ("../", "/", "a/../b", "a//"):
        with pytest.raises(StorageError, match="is no name inside"):
            list(store.names(prefix))
    assert (tmp_path / "b").read_bytes() == b"outside"


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sets(NAMES, max_size=8), st.one_of(st.just(""), NAMES, NAMES.map(lambda name: f"{name}/")))
def test_names_are_sorted_like_an_object_store_sorts_them(
    tmp_path_factory: pytest.TempPathFactory, names: set[str], prefix: str
) -> None:
    store = open_store(tmp_path_factory.mktemp("store"))
    kept: list[str] = []
    for name in sorted(names):
        try:
            store.put(name, name.encode(), only_if_absent=True)
        except StorageError:  # a file stands where this name needs a folder, which only an object store allows
            continue
        kept.append(name)
    assert list(store.names(prefix)) == sorted(name for name in kept if name.startswith(prefix))


def test_a_file_is_linked_into_the_store_whole_and_readable(store: Store, tmp_path: Path) -> None:
    local = tmp_path / "made"
    local.write_bytes(b"content")
    local.chmod(0o600)
    assert store.put_file("a/b", local, only_if_absent=True)
    placed = Path(store.uri) / "a/b"
    assert placed.stat().st_ino == local.stat().st_ino
    assert stat.S_IMODE(placed.stat().st_mode) == 0o644
    local.unlink()
    assert store.read("a/b") == b"content"
    assert list(store.names("")) == ["a/b"]
    other = tmp_path / "other"
    other.write_bytes(b"other")
    assert not store.put_file("a/b", other, only_if_absent=True)
    assert store.read("a/b") == b"content"
    assert store.put_file("a/b", other, only_if_absent=False)
    assert store.read("a/b") == b"other"
    assert [path.name for path in placed.parent.iterdir()] == ["b"], "nothing temporary is left"
    assert sha256_in_store(store, "a/b") == sha256_file(other)


def test_a_file_of_another_file_system_is_copied(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = tmp_path / "made"
    local.write_bytes(b"content")
    real = Path.hardlink_to

    def cross_device(self: Path, target: Path) -> None:
        if Path(target) == local:
            raise OSError(18, "Invalid cross-device link")
        real(self, target)

    monkeypatch.setattr(Path, "hardlink_to", cross_device)
    assert store.put_file("a", local, only_if_absent=True)
    local.write_bytes(b"changed")
    assert store.read("a") == b"content"


def test_a_put_that_fails_leaves_nothing(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = tmp_path / "made"
    local.write_bytes(b"content")

    def full(descriptor: int) -> None:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for put in (
        lambda: store.put("a", b"x", only_if_absent=True),
        lambda: store.put_file("a", local, only_if_absent=False),
    ):
        with pytest.raises(StorageError, match="No space left"):
            put()
    assert list(Path(store.uri).iterdir()) == []
    with pytest.raises(StorageError, match="missing"):
        store.put_file("b", tmp_path / "missing", only_if_absent=True)


def test_a_file_where_a_folder_is_needed_is_named(store: Store) -> None:
    store.put("a", b"x", only_if_absent=True)
    with pytest.raises(StorageError, match="cannot make the folder"):
        store.put("a/b", b"x", only_if_absent=True)


def test_of_many_threads_exactly_one_commits(store: Store, tmp_path: Path) -> None:
    won: list[tuple[str, int]] = []
    barrier = threading.Barrier(6)

    def build(number: int) -> None:
        local = tmp_path / str(number)
        local.write_bytes(bytes([number]))
        for name in ("x", "y", "z"):
            barrier.wait()
            put = (
                store.put(name, bytes([number]), only_if_absent=True)
                if number % 2
                else store.put_file(name, local, only_if_absent=True)
            )
            if put:
                won.append((name, number))

    threads = [threading.Thread(target=build, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for name, _ in won) == ["x", "y", "z"]
    for name, number in won:
        assert store.read(name) == bytes([number])


def test_no_traceback_of_a_store_that_is_away_holds_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2key")
    address = "http://me:with/hunter2@host/b/k?sign=hunter2key"
    cause = EndpointConnectionError(endpoint_url=address)
    with pytest.raises(StorageError, match=r"//\*\*\*@host/b/k") as caught:
        raise storage_error("read", "s3://b/k", cause) from cause
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))
