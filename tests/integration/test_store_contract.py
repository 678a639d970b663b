"""One contract, two stores: whatever is done to a local folder and to a prefix of a live S3 server, both answer the same."""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.errors import StorageError
from dflash.storage import Store, open_store, sha256_in_store
from dflash.storage.compression import expand, open_decompressed
from tests.support.s3_server import BUCKET, point_to, s3_server

NAMES = ("a", "b-x", "b/c", "b/d/e.f", "bucket=0/part-1", "bucket=1/part-1", "é 漢", "z/.hidden")
PREFIXES = ("", "b", "b/", "b/d", "bucket=", "bucket=0/", "no", "z/", "é")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(params=["local", "s3"])
def address(request: pytest.FixtureRequest, endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    point_to(monkeypatch, endpoint)
    return str(tmp_path / "store") if request.param == "local" else f"s3://{BUCKET}/{uuid4().hex}"


@pytest.fixture
def store(address: str) -> Store:
    return open_store(address)


def outcome(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except StorageError as error:
        return StorageError if error.what and error.remedy else error


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put_file", "put if absent", "put_file if absent", "delete", "read", "range", "open", "names"]),
        st.sampled_from(NAMES),
        st.binary(max_size=12),
        st.tuples(st.integers(0, 14), st.integers(0, 14)),
        st.sampled_from(PREFIXES),
    ),
    min_size=4,
    max_size=12,
)


def test_any_sequence_of_operations_is_that_of_a_dictionary(address: str, tmp_path: Path) -> None:
    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    @given(operations=OPERATIONS)
    def holds(operations: list[tuple[str, str, bytes, tuple[int, int], str]]) -> None:
        store, model = open_store(f"{address}/{uuid4().hex}"), dict[str, bytes]()
        for kind, name, data, (start, length), prefix in operations:
            if kind.startswith("put"):
                only_if_absent = kind.endswith("absent")
                (tmp_path / "local").write_bytes(data)
                written = (
                    store.put_file(name, tmp_path / "local", only_if_absent=only_if_absent)
                    if kind.startswith("put_file")
                    else store.put(name, data, only_if_absent=only_if_absent)
                )
                (tmp_path / "local").unlink()
                assert written == (not only_if_absent or name not in model)
                if written:
                    model[name] = data
            elif kind == "delete":
                store.delete(name)
                model.pop(name, None)
            elif kind == "read":
                assert outcome(partial(store.read, name)) == model.get(name, StorageError)
                assert store.size(name) == (len(model[name]) if name in model else None)
            elif kind == "range" and name in model:
                wanted = model[name][start : start + length]
                expected = wanted if len(wanted) == length else StorageError
                assert outcome(partial(store.read_range, name, start=start, length=length)) == expected
            elif kind == "open" and name in model:
                with store.open(name) as file:
                    assert file.seek(start) == start
                    assert file.read(length) == model[name][start : start + length]
                    assert file.seek(0, os.SEEK_END) == len(model[name])
            elif kind == "names":
                assert list(store.names(prefix)) == sorted(each for each in model if each.startswith(prefix))
        assert {name: store.read(name) for name in store.names("")} == model

    holds()


@pytest.mark.parametrize("use", ["read", "open", "read_range", "sha256"])
def test_an_absent_object_is_named(store: Store, use: str) -> None:
    actions: dict[str, Callable[[], Any]] = {
        "read": lambda: store.read("b/c"),
        "open": lambda: store.open("b/c").read(),
        "read_range": lambda: store.read_range("b/c", start=0, length=1),
        "sha256": lambda: sha256_in_store(store, "b/c"),
    }
    with pytest.raises(StorageError, match="b/c"):
        actions[use]()


def test_a_missing_local_file_writes_nothing(store: Store, tmp_path: Path) -> None:
    for only_if_absent in (True, False):
        with pytest.raises(StorageError, match="missing"):
            store.put_file("a", tmp_path / "missing", only_if_absent=only_if_absent)
    assert store.size("a") is None
    assert list(store.names("")) == []


def test_a_file_is_read_like_any_file(store: Store) -> None:
    content = hashlib.sha256(b"seed").digest() * 20_000
    store.put("big", content, only_if_absent=True)
    assert sha256_in_store(store, "big") == hashlib.sha256(content).hexdigest()
    memory = io.BytesIO(content)
    steps = [(0, 10), (500_000, 70_000), (100, 1), (639_990, 100), (640_000, 5), (3, 0), (0, -1), (639_999, -1), (700_000, 3)]
    with store.open("big") as file:
        assert file.readable()
        assert file.seekable()
        for start, length in steps:
            for each in (file, memory):
                each.seek(start)
            assert file.read(length) == memory.read(length)
            assert file.tell() == memory.tell()
        for each in (file, memory):
            each.seek(-7, os.SEEK_END)
            each.seek(-3, os.SEEK_CUR)
        assert file.read() == memory.read()
        buffer = bytearray(9)
        file.seek(5)
        assert file.readinto(buffer) == 9
        assert bytes(buffer) == content[5:14]


def test_an_open_file_keeps_the_version_that_was_opened_or_says_that_it_changed(store: Store) -> None:
    old, new = b"o" * 300_000, b"n" * 300_000
    store.put("a", old, only_if_absent=True)
    with store.open("a") as file:
        first = file.read(10)
        store.put("a", new, only_if_absent=False)
        assert outcome(lambda: first + file.read()) in (old, StorageError), "never a mixture"
    assert store.read("a") == new


def test_of_many_threads_one_creates_and_all_see_its_bytes(store: Store) -> None:
    barrier, won = threading.Barrier(4), list[bytes]()

    def create(number: int) -> None:
        data = bytes([number]) * 1000
        barrier.wait()
        if store.put("commit", data, only_if_absent=True):
            won.append(data)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.read("commit") == won[0]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.jsonl", ["a.jsonl", "b.jsonl"]),
        ("?.jsonl", ["a.jsonl", "b.jsonl"]),
        ("[!a].jsonl", ["b.jsonl"]),
        ("**/*.jsonl", ["a.jsonl", "b.jsonl", "x/c.jsonl", "x/y/d.jsonl"]),
        ("x/*", ["x/c.jsonl"]),
        ("*/*/*", ["x/y/d.jsonl"]),
        ("*.json", None),
        ("y/*", None),
    ],
)
def test_patterns_mean_the_same(address: str, store: Store, pattern: str, found: list[str] | None) -> None:
    for name in ("a.jsonl", "b.jsonl", "x/c.jsonl", "x/y/d.jsonl", "ab.txt"):
        store.put(name, name.encode(), only_if_absent=True)
    expected = StorageError if found is None else [f"{address}/{name}" for name in found]
    assert outcome(lambda: expand(f"{address}/{pattern}")) == expected
    for uri in [] if found is None else expand(f"{address}/{pattern}"):
        assert f"{address}/{b''.join(open_decompressed(uri)).decode()}" == uri
