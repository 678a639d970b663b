"""Storage over a network that breaks: a proxy between the client and a live server answers 503, stalls, cuts and resets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import boto3
import numpy as np
import pytest
from botocore.retries.standard import ExponentialBackoff

from dflash.errors import StorageError
from dflash.storage import Store, open_store, s3_client, s3_read, s3_write
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.s3_server import BUCKET, point_to, s3_server

MIB = 2**20
DATA = np.random.default_rng(0).bytes(3 * MIB)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def proxy(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with FaultyProxy(endpoint) as proxy:
        point_to(monkeypatch, proxy.url)
        monkeypatch.setenv(s3_client.READ_TIMEOUT_ENV, "0.4")
        monkeypatch.setenv(s3_client.CONNECT_TIMEOUT_ENV, "0.4")
        monkeypatch.setattr(s3_client, "_BACKOFF_S", 0.001)
        monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda self, context: 0.01)
        yield proxy


@pytest.fixture
def store(proxy: FaultyProxy) -> Store:
    return open_store(f"s3://{BUCKET}/{uuid4().hex}")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_write, "MULTIPART_FROM_BYTES", 5 * MIB)
    monkeypatch.setattr(s3_write, "PART_BYTES", 5 * MIB)


@contextmanager
def few_tries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    yield
    monkeypatch.delenv("AWS_MAX_ATTEMPTS")


@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", 1, "GET"),
        Fault("status", 1, "GET", status=500),
        Fault("stall", 1, "GET"),
        Fault("reset", 1, "GET"),
        Fault("cut", 1, "GET", after_bytes=0),
        Fault("cut", 4, "GET", after_bytes=300_000),
        Fault("cut", s3_read.MAX_RESUMES, "GET", after_bytes=10),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.status}-{fault.after_bytes}",
)
def test_a_read_comes_through(store: Store, proxy: FaultyProxy, fault: Fault) -> None:
    store.put("x", DATA, only_if_absent=False)
    fault = replace(fault)
    proxy.inject(fault)
    assert store.read("x") == DATA
    assert fault.times == 0, "the fault was met"
    proxy.faults.clear()


def test_a_broken_body_is_continued_and_not_begun_again(store: Store, proxy: FaultyProxy) -> None:
    store.put("x", DATA, only_if_absent=False)
    proxy.inject(Fault("cut", 2, "GET", after_bytes=MIB))
    proxy.requests.clear()
    with store.open("x") as file:
        file.seek(MIB)
        assert file.read() == DATA[MIB:]
    assert store.read_range("x", start=7, length=2 * MIB) == DATA[7 : 7 + 2 * MIB]
    assert sum(request.startswith("GET") for request in proxy.requests) <= 8


def test_an_object_that_changes_under_a_broken_read_is_not_mixed(store: Store, proxy: FaultyProxy) -> None:
    store.put("x", DATA, only_if_absent=False)
    proxy.inject(Fault("cut", 1, "GET", after_bytes=MIB))
    bucket, key = BUCKET, f"{store.uri.rpartition('/')[2]}/x"
    chunks = s3_read.object_chunks(bucket, key, start=0, length=None, tag=None)
    next(chunks)
    store.put("x", DATA[::-1], only_if_absent=False)
    with pytest.raises(StorageError, match="was replaced while it was read"):
        list(chunks)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault("status", 99, "GET"), "SlowDown"),
        (Fault("stall", 99, "GET"), "[Tt]imeout|timed out"),
        (Fault("reset", 99, "GET"), "[Cc]onnection"),
        (Fault("cut", 99, "GET", after_bytes=10), "cannot read"),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else "",
)
def test_a_read_that_never_succeeds_ends_with_a_clear_error(
    store: Store, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, fault: Fault, said: str
) -> None:
    store.put("x", DATA, only_if_absent=False)
    fault = replace(fault)
    proxy.inject(fault)
    proxy.requests.clear()
    with few_tries(monkeypatch), pytest.raises(StorageError, match=said) as raised:
        store.read("x")
    assert f"{store.uri}/x" in str(raised.value)
    assert "AWS_ENDPOINT_URL" in raised.value.remedy
    assert "hidden-secret" not in str(raised.value)
    assert len(proxy.requests) <= 2 * (s3_read.MAX_RESUMES + 1), "bounded"


@pytest.mark.parametrize("kind", ["status", "stall", "reset", "lose_answer"])
@pytest.mark.parametrize("only_if_absent", [True, False])
def test_a_write_comes_through_and_knows_that_it_was_its_own(
    store: Store, proxy: FaultyProxy, kind: str, only_if_absent: bool
) -> None:
    fault = Fault(kind, 1, "PUT")  # type: ignore[arg-type]
    fault = replace(fault)
    proxy.inject(fault)
    assert store.put("x", DATA, only_if_absent=only_if_absent)
    assert fault.times == 0
    assert store.read("x") == DATA
    assert not store.put("x", b"other", only_if_absent=True)


def test_a_lost_answer_does_not_make_another_writers_object_ours(store: Store, proxy: FaultyProxy) -> None:
    assert store.put("x", b"theirs", only_if_absent=True)
    proxy.inject(Fault("lose_answer", 1, "PUT"))
    assert not store.put("x", b"ours", only_if_absent=True)
    assert store.read("x") == b"theirs"


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    "fault",
    [
        Fault("reset", 1, "PUT", "partNumber=2"),
        Fault("status", 1, "PUT", "partNumber=1"),
        Fault("lose_answer", 1, "POST", "uploadId="),
        Fault("status", 1, "POST", "uploads"),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.path_holds}",
)
def test_a_large_write_comes_through(store: Store, proxy: FaultyProxy, tmp_path: Path, fault: Fault) -> None:
    local = tmp_path / "large"
    local.write_bytes(np.random.default_rng(1).bytes(11 * MIB))
    fault = replace(fault)
    proxy.inject(fault)
    assert store.put_file("large", local, only_if_absent=True)
    assert fault.times == 0
    assert store.read("large") == local.read_bytes()
    assert open_uploads() == []


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("broken", [("PUT", "partNumber=2"), ("POST", "uploadId=")])
def test_a_large_write_that_fails_leaves_nothing(
    store: Store, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: tuple[str, str]
) -> None:
    local = tmp_path / "large"
    local.write_bytes(b"x" * (11 * MIB))
    proxy.inject(Fault("status", 99, *broken))
    with few_tries(monkeypatch), pytest.raises(StorageError, match=f"cannot write {store.uri}/large"):
        store.put_file("large", local, only_if_absent=False)
    proxy.faults.clear()
    assert store.size("large") is None
    assert list(store.names("")) == []
    assert open_uploads() == []


@pytest.mark.usefixtures("small_parts")
def test_a_file_that_shrinks_while_it_is_uploaded_is_refused(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = tmp_path / "large"
    local.write_bytes(b"x" * (11 * MIB))
    real = s3_write._upload_parts

    def shrink_first(*arguments: object) -> object:
        local.write_bytes(b"x" * (6 * MIB))
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(s3_write, "_upload_parts", shrink_first)
    with pytest.raises(StorageError, match="changed while it was uploaded"):
        store.put_file("large", local, only_if_absent=False)
    assert store.size("large") is None
    assert open_uploads() == []


def test_other_methods_fail_clearly_too(store: Store, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    with few_tries(monkeypatch):
        for method, use, said in (
            ("HEAD", lambda: store.size("x"), "cannot look at"),
            ("GET", lambda: list(store.names("")), "cannot list"),
            ("DELETE", lambda: store.delete("x"), "cannot remove"),
            ("PUT", lambda: store.put("x", b"", only_if_absent=True), "cannot write"),
        ):
            proxy.inject(Fault("status", 99, method))
            with pytest.raises(StorageError, match=f"{said} {store.uri}"):
                use()


def test_secrets_stay_out_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    point_to(monkeypatch, "http://me:hidden-password@127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(StorageError, match="cannot read s3://runs/x") as raised:
        open_store("s3://runs").read("x")
    assert "hidden" not in str(raised.value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    with pytest.raises(StorageError, match="AWS_PROFILE"):
        open_store("s3://runs").read("x")


def open_uploads() -> list[str]:
    return [upload["Key"] for upload in boto3.client("s3").list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])]
