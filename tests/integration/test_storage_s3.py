from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from uuid import uuid4

import boto3
import numpy as np
import pytest

from dflash.errors import StorageError
from dflash.storage import (
    Store,
    get_bytes,
    open_binary,
    open_store,
    put_file,
    s3_client,
    s3_store,
    s3_write,
    sha256_in_store,
)
from tests.support.s3_server import BUCKET, environment, point_to, s3_server

MIB = 2**20


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def folder(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    point_to(monkeypatch, endpoint)
    return f"s3://{BUCKET}/{uuid4().hex}"


@pytest.fixture
def store(folder: str) -> Store:
    return open_store(folder)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_write, "MULTIPART_FROM_BYTES", 5 * MIB)
    monkeypatch.setattr(s3_write, "PART_BYTES", 5 * MIB)


def test_objects_round_trip_by_address(folder: str, tmp_path: Path) -> None:
    local = tmp_path / "x.jsonl"
    local.write_bytes("a\nñ\n".encode())
    assert put_file(local, f"{folder}/some/x.jsonl", only_if_absent=False)
    assert get_bytes(f"{folder}/some/x.jsonl") == local.read_bytes()
    with open_binary(f"{folder}/some/x.jsonl") as file:
        assert file.read() == local.read_bytes()


def test_a_store_keeps_its_promises(store: Store) -> None:
    assert store.local_root is None
    assert store.size("a/b") is None
    assert store.put("a/b", b"first", only_if_absent=True)
    assert not store.put("a/b", b"second", only_if_absent=True)
    assert store.read("a/b") == b"first"
    assert store.put("a/b", b"0123456789", only_if_absent=False)
    assert store.size("a/b") == 10
    assert store.read_range("a/b", start=2, length=3) == b"234"
    assert store.read_range("a/b", start=10, length=0) == b""
    store.put("a/empty", b"", only_if_absent=False)
    assert store.read("a/empty") == b""
    store.put("a-", b"x", only_if_absent=False)
    assert list(store.names("")) == ["a-", "a/b", "a/empty"]
    assert list(store.names("a/")) == ["a/b", "a/empty"]
    assert list(store.names("a/e")) == ["a/empty"]
    store.delete("a/b")
    store.delete("a/b")
    assert store.size("a/b") is None


def test_a_range_behind_the_end_names_the_object(store: Store) -> None:
    store.put("x", b"12345", only_if_absent=False)
    with pytest.raises(StorageError, match=r"/x ends at byte 5, 7 are asked for"):
        store.read_range("x", start=4, length=3)
    with pytest.raises(StorageError, match=r"/x ends at byte"):
        store.read_range("x", start=9, length=1)


def test_a_missing_object_or_bucket_names_the_uri(store: Store, folder: str) -> None:
    with pytest.raises(StorageError, match=f"{folder}/none"):
        store.read("none")
    with pytest.raises(StorageError, match=f"{folder}/none does not exist"):
        store.open("none")
    with pytest.raises(StorageError, match="s3://other/none"):
        get_bytes("s3://other/none")
    with pytest.raises(StorageError, match="s3://other"):
        list(open_store("s3://other").names(""))


def test_more_names_than_a_page_of_the_listing_holds(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_store, "LISTED_AT_ONCE", 3)
    names = [f"n/{number}" for number in range(8)]
    for name in reversed(names):
        store.put(name, b"", only_if_absent=False)
    assert list(store.names("n/")) == names


def test_a_file_of_an_object_can_be_read_anyhow(store: Store) -> None:
    data = np.random.default_rng(0).bytes(2 * MIB)
    store.put("x", data, only_if_absent=False)
    random = np.random.default_rng(1)
    with store.open("x") as file:
        for _ in range(30):
            start, length = int(random.integers(len(data))), int(random.integers(1, 100_000))
            file.seek(start)
            assert file.read(length) == data[start : start + length]
            assert file.tell() == min(start + length, len(data))
        file.seek(-3, os.SEEK_END)
        assert file.read() == data[-3:]
        file.seek(0)
        assert b"".join(iter(lambda: file.read(33_333), b"")) == data
        assert sha256_in_store(store, "x") == hashlib.sha256(data).hexdigest()
        file.seek(0)
        store.put("x", data[::-1], only_if_absent=False)
        with pytest.raises(StorageError, match="was replaced while it was read"):
            file.read(1 * MIB)


@pytest.mark.usefixtures("small_parts")
def test_a_large_file_travels_in_parts(store: Store, tmp_path: Path) -> None:
    local = tmp_path / "large"
    local.write_bytes(np.random.default_rng(0).bytes(11 * MIB))
    assert store.put_file("large", local, only_if_absent=True)
    assert not store.put_file("large", local, only_if_absent=True)
    assert store.size("large") == 11 * MIB
    assert store.read("large") == local.read_bytes()
    key = f"{store.uri.rpartition('/')[2]}/large"
    assert boto3.client("s3").head_object(Bucket=BUCKET, Key=key)["ETag"].endswith('-3"'), "three parts"
    assert_no_upload_is_open()


def assert_no_upload_is_open() -> None:
    assert "Uploads" not in boto3.client("s3").list_multipart_uploads(Bucket=BUCKET)


def _build(number: int, address: str, folder: str, names: list[str], barrier: Barrier, won: Queue[tuple[str, int]]) -> None:
    """A builder process: tries to commit every name."""
    os.environ.update(environment(address))
    s3_write.MULTIPART_FROM_BYTES = s3_write.PART_BYTES = 5 * MIB
    store = open_store(folder)
    local = Path(f"/proc/self/fd/{os.memfd_create('large')}")
    local.write_bytes(bytes([number]) * (6 * MIB))
    for name in names:
        barrier.wait(60)
        if name.startswith("large"):
            committed = store.put_file(name, local, only_if_absent=True)
        else:
            committed = store.put(name, bytes([number]), only_if_absent=True)
        if committed:
            won.put((name, number))


def test_of_two_builders_exactly_one_commits_the_manifest(endpoint: str, store: Store) -> None:
    names = [*(f"manifests/{number}.json" for number in range(25)), *(f"large/{number}" for number in range(3))]
    spawn = multiprocessing.get_context("spawn")
    barrier, won = spawn.Barrier(2), spawn.Queue()
    builders = [spawn.Process(target=_build, args=(number, endpoint, store.uri, names, barrier, won)) for number in (1, 2)]
    for builder in builders:
        builder.start()
    found = [won.get(timeout=60) for _ in names]
    for builder in builders:
        builder.join(60)
        assert builder.exitcode == 0
    assert won.empty()
    assert sorted(name for name, _ in found) == sorted(names)
    for name, number in found:
        assert set(store.read(name)) == {number}, name
    assert_no_upload_is_open()


def test_a_forked_child_makes_a_client_of_its_own(store: Store) -> None:
    store.put("x", b"x", only_if_absent=False)
    mine = s3_client.s3_client()
    child = os.fork()
    if child == 0:
        os._exit(0 if s3_client.s3_client() is not mine and store.read("x") == b"x" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert s3_client.s3_client() is mine


def test_path_style_and_region_come_from_the_configuration(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert s3_client.s3_client().meta.config.s3 is None
    profile = tmp_path / "config"
    profile.write_text(
        "[default]\nregion = eu-west-3\nretry_mode = adaptive\nmax_attempts = 9\ns3 =\n  addressing_style = virtual\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(profile))
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv(s3_client.READ_TIMEOUT_ENV, "7.5")
    config = s3_client.s3_client().meta.config
    assert config.s3 == {"addressing_style": "virtual"}
    assert config.region_name == "eu-west-3"
    assert config.retries == {"mode": "adaptive", "total_max_attempts": 9}
    assert (config.connect_timeout, config.read_timeout) == (s3_client.CONNECT_TIMEOUT_S, 7.5)
    monkeypatch.setenv(s3_client.READ_TIMEOUT_ENV, "soon")
    with pytest.raises(StorageError, match="DFLASH_S3_READ_TIMEOUT_S is 'soon'"):
        store.read("x")
