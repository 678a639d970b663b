"""Sources on an S3 server: patterns, compressed files and tables are read as they are from a local disk."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash.data.conversations import read_conversations
from dflash.errors import StorageError
from dflash.records import Conversation
from dflash.storage import open_store
from dflash.storage.compression import expand
from tests.support.s3_server import BUCKET, point_to, s3_server

ROWS = [{"prompt": f"question {number}", "completion": f"answer {number}"} for number in range(40)]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def folder(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    point_to(monkeypatch, endpoint)
    return f"s3://{BUCKET}/{uuid4().hex}"


@pytest.fixture
def sources(folder: str, tmp_path: Path) -> str:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "t.parquet", row_group_size=7)
    contents = {
        "a.jsonl": lines,
        "b.jsonl.gz": gzip.compress(lines),
        "c.jsonl.zst": pa.Codec("zstd").compress(lines).to_pybytes(),
        "deep/d.json": json.dumps({"rows": ROWS}).encode(),
        "deep/e.parquet": (tmp_path / "t.parquet").read_bytes(),
        "deep/f.parquet.gz": gzip.compress((tmp_path / "t.parquet").read_bytes()),
    }
    store = open_store(folder)
    for name, content in contents.items():
        store.put(name, content, only_if_absent=True)
    return folder


def test_every_format_is_read_from_objects(sources: str) -> None:
    rows = list(read_conversations([f"{sources}/*.jsonl*", f"{sources}/deep/*"], limit=None, system_prompt=None))
    assert len(rows) == 6 * len(ROWS)
    for start in range(0, len(rows), len(ROWS)):
        part = rows[start : start + len(ROWS)]
        assert [row.messages[0].content for row in part if isinstance(row, Conversation)] == [row["prompt"] for row in ROWS]
    assert rows[0].origin == f"{sources}/a.jsonl:1"
    assert rows[-1].origin == f"{sources}/deep/f.parquet.gz:40"


def test_patterns_over_objects(sources: str) -> None:
    def found(pattern: str) -> list[str]:
        return [name.removeprefix(f"{sources}/") for name in expand(f"{sources}/{pattern}")]

    assert found("*") == ["a.jsonl", "b.jsonl.gz", "c.jsonl.zst"]
    assert found("**/*.parquet*") == ["deep/e.parquet", "deep/f.parquet.gz"]
    assert found("[bc].jsonl.*") == ["b.jsonl.gz", "c.jsonl.zst"]
    with pytest.raises(StorageError, match="no file matches"):
        found("nothing-*")


def test_a_missing_object_is_named(folder: str) -> None:
    with pytest.raises(StorageError, match=r"nowhere\.jsonl"):
        list(read_conversations([f"{folder}/nowhere.jsonl"], limit=None, system_prompt=None))
