"""Any bytes as a file of conversations give conversations, rows that are set aside, or one error that names the file."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash.data.conversations import read_source
from dflash.errors import DflashError
from dflash.records import Conversation, QuarantinedRow, to_json
from tests.support.fuzz import TIMEOUT_S, changed_bytes, changed_json, explained, fuzz, json_text

TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning": "r"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
ROWS: list[Any] = [
    {"id": "1", "messages": TURNS, "kind": "k"},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
    {"prompt": "q", "response": "a"},
    {
        "prompt": [{"role": "user", "content": [{"type": "text", "text": "q"}]}],
        "completion": [{"role": "assistant", "content": "a"}],
    },
    {"text": "once upon a time"},
    {
        "messages": [
            TURNS[0],
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "2"},
            TURNS[1],
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    },
]


def _parquet() -> bytes:
    held = io.BytesIO()
    pq.write_table(pa.table({"messages": pa.array([TURNS] * 4), "id": list("abcd")}), held)
    return held.getvalue()


LINES = b"".join(json_text(row) + b"\n" for row in ROWS)
FILES = [LINES, json_text(ROWS), json_text({"data": ROWS}), _parquet(), gzip.compress(LINES, mtime=0)]

pytestmark = pytest.mark.timeout(TIMEOUT_S)


def checked(tmp_path: Path) -> Any:
    file = tmp_path / "rows"

    def check(data: bytes) -> None:
        file.write_bytes(data)
        try:
            found = list(read_source(str(file), label="rows", system_prompt="s"))
        except DflashError as error:
            assert str(file) in explained(error).what  # noqa: PT017 - either may come
            return
        for row in found:
            assert isinstance(row, Conversation | QuarantinedRow)
            to_json(row).encode("utf-8")

    return check


def test_any_bytes(tmp_path: Path) -> None:
    fuzz(changed_bytes(FILES), checked(tmp_path), usual=60, share=0.5)


def test_any_values(tmp_path: Path) -> None:
    def file_of(rows: Any) -> bytes:
        return b"".join(json_text(row) + b"\n" for row in rows) if isinstance(rows, list) else json_text(rows)

    fuzz(changed_json([ROWS]).map(file_of) | changed_json([ROWS]).map(json_text), checked(tmp_path), usual=60, share=0.5)


def test_the_examples_are_read(tmp_path: Path) -> None:
    for number, data in enumerate(FILES):
        (tmp_path / str(number)).write_bytes(data)
        found = list(read_source(str(tmp_path / str(number)), label="rows", system_prompt=None))
        assert all(isinstance(row, Conversation) for row in found), found
