from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from dflash.errors import StorageError
from dflash.storage import get_bytes, put_file, read_lines


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    boto3.client("s3").create_bucket(Bucket="runs")
    yield "s3://runs"
    server.stop()


def test_objects_round_trip_through_a_real_server(bucket: str, tmp_path: Path) -> None:
    local = tmp_path / "x.jsonl"
    local.write_bytes("a\nñ\n".encode())
    assert put_file(local, f"{bucket}/some/x.jsonl", only_if_absent=False)
    assert get_bytes(f"{bucket}/some/x.jsonl") == local.read_bytes()
    assert list(read_lines(f"{bucket}/some/x.jsonl")) == ["a", "ñ"]


def test_only_if_absent_never_replaces_an_object(bucket: str, tmp_path: Path) -> None:
    local = tmp_path / "m"
    local.write_bytes(b"first")
    assert put_file(local, f"{bucket}/manifest", only_if_absent=True)
    local.write_bytes(b"second")
    assert not put_file(local, f"{bucket}/manifest", only_if_absent=True)
    assert get_bytes(f"{bucket}/manifest") == b"first"


def test_a_missing_object_or_bucket_names_the_uri(bucket: str) -> None:
    for uri in (f"{bucket}/none", "s3://other/none"):
        with pytest.raises(StorageError, match=uri):
            get_bytes(uri)
