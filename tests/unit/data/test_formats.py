"""File formats: the same rows come out of every one, in bounded memory, and damage stays where it is."""

from __future__ import annotations

import gzip
import json
import pickle
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data import formats_json
from dflash.data.conversations import parse_batch, read_source
from dflash.data.formats import RawRow, read_raw_batches
from dflash.data.formats_json import OversizedRow, list_offset, list_rows, text_lines
from dflash.errors import DataError, StorageError
from dflash.records import Conversation, QuarantinedRow

ROWS: list[dict[str, Any]] = [
    {"prompt": f'question {i} "quoted" \\ [{{,}}] \u2028 🙂\r\n', "completion": f"answer {i}", "id": f"r{i}"} for i in range(25)
]


def write(path: Path, form: str, rows: list[dict[str, Any]] = ROWS) -> str:
    data, _, codec = form.partition("+")
    if data == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=max(4, len(rows) // 8))
        content = path.read_bytes()
    else:
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        text = {
            "lines": "".join(f"{line}\n" for line in lines),
            "lines without end": "\n".join(lines),
            "list": json.dumps(rows),
            "pretty list": "\ufeff \n" + json.dumps(rows, indent=2, ensure_ascii=False) + "\n",
            "data object": json.dumps({"version": "1", "note": {"a": [1]}, "data": rows, "more": 2}),
            "rows object": json.dumps({"rows": rows}, indent=1),
        }[data]
        content = text.encode()
    if codec == "gzip":
        content = gzip.compress(content)
    elif codec == "zstd":
        content = pa.Codec("zstd").compress(content).to_pybytes()
    path.write_bytes(content)
    return str(path)


FORMS = ["lines", "lines without end", "list", "pretty list", "data object", "rows object", "parquet"]


@pytest.mark.parametrize("codec", ["", "+gzip", "+zstd"])
@pytest.mark.parametrize("form", FORMS)
def test_every_format_gives_the_same_conversations(tmp_path: Path, form: str, codec: str) -> None:
    file = write(tmp_path / "a.json", form + codec)
    found = list(read_source(file, label="a", system_prompt=None))
    assert [row.id for row in found if isinstance(row, Conversation)] == [row["id"] for row in ROWS]
    assert [tuple(m.content for m in row.messages) for row in found if isinstance(row, Conversation)] == [
        (row["prompt"], row["completion"]) for row in ROWS
    ]
    assert [row.origin for row in found] == [f"{file}:{number}" for number in range(1, len(ROWS) + 1)]


@pytest.mark.parametrize("form", FORMS)
def test_batches_are_bounded_count_on_and_travel(tmp_path: Path, form: str) -> None:
    file = write(tmp_path / "a.json", form)
    batches = list(read_raw_batches(file, rows_per_batch=7))
    assert [len(batch.rows) for batch in batches] == [7, 7, 7, 4]
    assert [batch.first_row for batch in batches] == [1, 8, 15, 22]
    copies = [pickle.loads(pickle.dumps(batch)) for batch in batches]  # noqa: S301 - what a process pool does
    rows = [row for batch in copies for row in parse_batch(batch, label="a", system_prompt="be kind")]
    assert [row.messages[0].content for row in rows if isinstance(row, Conversation)] == ["be kind"] * len(ROWS)


def test_a_suffix_settles_that_lines_are_lines(tmp_path: Path) -> None:
    row = {"data": [{"prompt": "not a row"}], "prompt": "a row"}
    for name, expected in (("a.jsonl", ["a row"]), ("a.jsonl.gz", ["a row"]), ("a.json", ["not a row"])):
        file = write(tmp_path / name, "lines", [row])
        found = list(read_source(file, label="a", system_prompt=None))
        assert [each.messages[0].content for each in found if isinstance(each, Conversation)] == expected


class TestDamage:
    def test_one_line_that_is_no_utf8_is_one_bad_row(self, tmp_path: Path) -> None:
        file = tmp_path / "a.jsonl"
        file.write_bytes(b'{"prompt": "hi"}\n{"prompt": "\xff\xfe"}\n{"prompt": "ho"}\n')
        good, bad, more = read_source(str(file), label="a", system_prompt=None)
        assert isinstance(good, Conversation)
        assert isinstance(more, Conversation)
        assert bad == QuarantinedRow(f"{file}:2", "not_utf8: byte 0xff at offset 12 of the row is not UTF-8")

    def test_one_faulty_element_of_a_list_is_one_bad_row(self, tmp_path: Path) -> None:
        file = tmp_path / "a.json"
        file.write_text('[{"prompt": "hi"}, {"prompt": oops}, 7, {"prompt": "ho"}]')
        found = list(read_source(str(file), label="a", system_prompt=None))
        assert [type(row) for row in found] == [Conversation, QuarantinedRow, QuarantinedRow, Conversation]
        assert [row.origin for row in found] == [f"{file}:{number}" for number in range(1, 5)]

    @pytest.mark.parametrize("size", [1, 40, -1])
    def test_a_list_that_is_cut_short_is_an_error(self, tmp_path: Path, size: int) -> None:
        file = tmp_path / "a.json"
        file.write_text(json.dumps(ROWS)[:size])
        with pytest.raises(DataError, match=r"a\.json ends inside its list of rows, after \d+ whole ones"):
            list(read_source(str(file), label="a", system_prompt=None))

    def test_a_damaged_table_is_an_error(self, tmp_path: Path) -> None:
        file = Path(write(tmp_path / "a.parquet", "parquet"))
        file.write_bytes(file.read_bytes()[:-20])
        with pytest.raises(DataError, match=r"a\.parquet is no readable Parquet file"):
            list(read_source(str(file), label="a", system_prompt=None))

    def test_a_table_without_any_known_column_is_an_error_that_shows_its_columns(self, tmp_path: Path) -> None:
        file = write(tmp_path / "a.parquet", "parquet", [{"question": "hi", "answer": "ho"}])
        with pytest.raises(DataError, match="has the columns question, answer, none of messages, conversations, prompt, text"):
            list(read_source(file, label="a", system_prompt=None))

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(StorageError, match=r"nowhere\.jsonl"):
            list(read_source(str(tmp_path / "nowhere.jsonl"), label="a", system_prompt=None))

    @pytest.mark.parametrize("form", ["lines", "list", "data object"])
    def test_a_row_too_large_is_one_bad_row(self, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(formats_json, "MAX_ROW_BYTES", 2000)
        rows = [{"prompt": "hi"}, {"prompt": "long " * 1000}, {"prompt": "ho"}]
        found = list(read_source(write(tmp_path / "a.json", form, rows), label="a", system_prompt=None))
        assert [type(row) for row in found] == [Conversation, QuarantinedRow, Conversation]
        assert found[1].reason.startswith("row_too_large: the row has 50")  # type: ignore[union-attr]


def test_a_table_gives_only_what_its_rows_have(tmp_path: Path) -> None:
    call = {"name": "weather", "arguments": {"day": 2}}
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], "unused": [1], "tools": None},
        {
            "messages": [
                {"role": "user", "content": "fine?"},
                {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]},
                {"role": "tool", "content": "7", "name": "weather"},
            ],
            "tools": '[{"name": "weather", "parameters": {"type": "object"}}]',
        },
        {"messages": None, "tools": None},
    ]
    first, second, third = read_source(write(tmp_path / "a.parquet", "parquet", rows), label="a", system_prompt=None)
    assert isinstance(first, Conversation)
    assert isinstance(second, Conversation)
    assert first.messages[1].tool_calls == ()
    assert first.tools == ()
    assert second.messages[1].tool_calls == ({"type": "function", "function": call},)
    assert second.messages[2].name == "weather"
    assert second.tools == ({"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},)
    assert isinstance(third, QuarantinedRow)


@pytest.mark.parametrize("form", ["lines", "list", "lines+gzip", "parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, form: str) -> None:
    def peak(rows: int) -> int:
        file = write(tmp_path / f"{rows}.json", form, [{"prompt": "hi " * 300, "n": i} for i in range(rows)])
        tracemalloc.start()
        assert sum(len(batch.rows) for batch in read_raw_batches(file, rows_per_batch=50)) == rows
        _, used = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return used

    peak(100)
    assert peak(4_000) < peak(1_500) + 1_200_000, "more than twice the rows (2.5 MB more) in the same memory"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(alphabet=st.sampled_from('ab"\\[]{},: \n🙂'), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from('ab"]'), inner, max_size=3),
    max_leaves=8,
)


def chunked(content: bytes, sizes: list[int]) -> Iterator[bytes]:
    start = 0
    for size in sizes:
        if start < len(content):
            yield content[start : start + size]
        start += size
    if start < len(content):
        yield content[start:]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(elements=st.lists(JSON, max_size=5), sizes=st.lists(st.integers(1, 9), max_size=40), indent=st.sampled_from([None, 1]))
def test_elements_of_a_list_are_found_however_it_is_cut_into_chunks(
    elements: list[Any], sizes: list[int], indent: int | None
) -> None:
    content = json.dumps(elements, ensure_ascii=indent is None, indent=indent).encode()
    found = list(list_rows("x", chunked(content, sizes), start=0, alone=True))
    assert [json.loads(row) for row in found if isinstance(row, bytes)] == elements
    assert len(found) == len(elements)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(texts=st.lists(st.integers(0, 40), min_size=1, max_size=6), sizes=st.lists(st.integers(1, 9), max_size=40))
def test_rows_above_the_limit_are_told_by_their_size_however_they_are_cut(texts: list[int], sizes: list[int]) -> None:
    rows = [json.dumps('\\"' * (length // 2) + "a" * (length % 2)).encode() for length in texts]
    limit = 20
    expected: list[RawRow] = [OversizedRow(len(row)) if len(row) > limit else row for row in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats_json, "MAX_ROW_BYTES", limit)
        assert list(text_lines(chunked(b"\n".join(rows), sizes))) == expected
        assert list(list_rows("x", chunked(b"[" + b",".join(rows) + b"]", sizes), start=0, alone=True)) == expected


@settings(max_examples=100, deadline=None, derandomize=True)
@given(lines=st.lists(st.binary(max_size=6).filter(lambda line: b"\n" not in line), max_size=6), sizes=st.lists(st.integers(1, 5)))
def test_lines_are_what_splitting_gives(lines: list[bytes], sizes: list[int]) -> None:
    content = b"".join(line + b"\n" for line in lines)
    found: Iterable[RawRow] = text_lines(chunked(content, sizes))
    assert list(found) == lines


@pytest.mark.parametrize(
    ("head", "at"),
    [
        ('{"data": [1]}', 9),
        (' {\n"rows":[', 10),
        ('{"a": {"data": [1]}, "data" : [', 30),
        ('{"a": "data", "b": [', None),
        ('{"data": {"x": [1]}}', None),
        ('{"data"', None),
        ('{"é": "\\"data\\": [", "rows": [', 30),
        ("{}", None),
        ("{oops", None),
    ],
)
def test_the_list_inside_an_object_is_found_by_its_key(head: str, at: int | None) -> None:
    content = head.encode()
    found = list_offset(content, ("data", "rows"))
    assert found == at
    assert at is None or content[found : found + 1] == b"["
