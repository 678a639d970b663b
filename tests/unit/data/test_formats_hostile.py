"""Source files as people really have them: cut, glued together, oddly encoded, of mixed shapes; nothing is lost silently."""

from __future__ import annotations

import gzip
import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data.conversations import read_conversations, read_source
from dflash.errors import DataError, StorageError
from dflash.records import Conversation, Message, QuarantinedRow, to_json

ROWS: list[dict[str, Any]] = [
    {"prompt": "a", "completion": "b"},
    {"prompt": 'quoted "\\" [{,', "completion": "é\u2028🙂"},
    {"prompt": "last", "completion": "]}"},
]
BOM = b"\xef\xbb\xbf"
LINES = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in ROWS)
LIST = json.dumps(ROWS, ensure_ascii=False).encode()
OBJECT = b'{"note": ["]"], "data": ' + LIST + b', "more": {"x": [1]}}'


def read(content: bytes, folder: Path, name: str = "f.json") -> list[Conversation | QuarantinedRow]:
    (folder / name).write_bytes(content)
    return list(read_source(str(folder / name), label="f", system_prompt=None))


def texts(found: list[Conversation | QuarantinedRow]) -> list[tuple[str, ...] | str]:
    """Contents of the turns, or the reason code of a bad row."""
    return [
        row.reason.partition(":")[0] if isinstance(row, QuarantinedRow) else tuple(turn.content for turn in row.messages)
        for row in found
    ]


WHOLE = [tuple(row.values()) for row in ROWS]


def as_parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


class TestCutAnywhere:
    """A file that a broken copy has shortened."""

    @pytest.mark.parametrize("content", [LIST, OBJECT], ids=["list", "object"])
    def test_a_list_of_rows_is_whole_or_an_error(self, tmp_path: Path, content: bytes) -> None:
        assert texts(read(content, tmp_path)) == WHOLE
        named = bad_rows = 0
        for size in range(1, len(content)):
            try:
                found = read(content[:size], tmp_path)
            except DataError as error:
                named += "f.json" in error.what and bool(error.remedy)
            else:
                bad_rows += 1
                assert content is OBJECT, size
                assert {type(row) for row in found} == {QuarantinedRow}, "before the list opens nothing tells it from JSON lines"
                assert size <= content.index(b'"data"') + len('"data": ')
        assert named + bad_rows == len(content) - 1

    def test_lines_lose_the_cut_row_alone(self, tmp_path: Path) -> None:
        ends = [at for at in range(len(LINES)) if LINES[at : at + 1] == b"\n"]
        for size in range(len(LINES)):
            found = texts(read(LINES[:size], tmp_path, "f.jsonl"))
            whole = sum(end <= size for end in ends)
            assert found[:whole] == WHOLE[:whole]
            assert all(code in ("not_json", "not_utf8") for code in found[whole:])
            begun = size > (ends[whole - 1] + 1 if whole else 0)
            assert len(found) == whole + begun

    @pytest.mark.parametrize("codec", ["gzip", "zstd"])
    def test_a_packed_file_is_whole_or_an_error(self, tmp_path: Path, codec: str) -> None:
        packed = gzip.compress(LINES) if codec == "gzip" else pa.Codec("zstd").compress(LINES).to_pybytes()
        for size in range(5, len(packed)):
            with pytest.raises(StorageError, match=r"f\.jsonl"):
                read(packed[:size], tmp_path, "f.jsonl")

    def test_a_table_is_whole_or_an_error(self, tmp_path: Path) -> None:
        content = as_parquet(pa.Table.from_pylist(ROWS))
        for size in range(4, len(content), 7):
            with pytest.raises(DataError, match=r"f\.parquet is no readable Parquet file"):
                read(content[:size], tmp_path, "f.parquet")


class TestMoreThanOneList:
    @pytest.mark.parametrize(
        "content",
        [
            LIST + b"\n" + LIST,
            LIST + b"\n" + LINES,
            b'[["role", "user"]]\n[["role", "user"]]\n',
            b'[{"prompt": "a", "completion": "b"}}, {"prompt": "lost", "completion": "b"}]',
            OBJECT + b"\n" + OBJECT,
            b'{"data": ' + LIST + b"}\n" + LINES,
            LIST + b"\0" * 300,
        ],
        ids=["two lists", "list and lines", "a list a line", "bracket too many", "two objects", "object and lines", "zeros"],
    )
    def test_what_follows_a_list_is_never_dropped_silently(self, tmp_path: Path, content: bytes) -> None:
        with pytest.raises(DataError, match=r"f\.json goes on after its list of \d rows") as caught:
            read(content, tmp_path)
        assert ".jsonl" in caught.value.remedy

    @pytest.mark.parametrize("behind", [b"", b"\n", b" \t\r\n\r\n" * 400])
    def test_white_space_is_nothing(self, tmp_path: Path, behind: bytes) -> None:
        for content in (LIST, OBJECT):
            assert texts(read(content + behind, tmp_path)) == WHOLE

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(
        before=st.dictionaries(st.sampled_from(["a", "]", '"']), st.sampled_from([1, "}", {"data": [1]}, [[]]]), max_size=2),
        after=st.dictionaries(st.sampled_from(["z", "}", '\\"']), st.sampled_from([1, '"]', {"rows": [{}]}, [[]]]), max_size=2),
        key=st.sampled_from(["data", "rows"]),
        indent=st.sampled_from([None, 1]),
        bom=st.sampled_from([b"", BOM]),
    )
    def test_the_list_is_found_among_any_other_keys(
        self, tmp_path_factory: pytest.TempPathFactory, before: Any, after: Any, key: str, indent: int | None, bom: bytes
    ) -> None:
        content = bom + json.dumps({**before, key: ROWS, **after}, indent=indent).encode()
        assert texts(read(content, tmp_path_factory.mktemp("one"))) == WHOLE


class TestText:
    @pytest.mark.parametrize("name", ["f.jsonl", "f.json", "f.txt"])
    @pytest.mark.parametrize("bom", [b"", BOM], ids=["", "byte order mark"])
    @pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\n\n", b"\r\n \r\n"])
    def test_line_ends_blank_lines_and_a_byte_order_mark_change_nothing(
        self, tmp_path: Path, name: str, bom: bytes, end: bytes
    ) -> None:
        assert texts(read(bom + LINES.replace(b"\n", end), tmp_path, name)) == WHOLE

    @pytest.mark.parametrize(
        ("row", "said"),
        [
            (b"\0\0\0", "not_json"),
            (b'{"prompt": "e\0f", "completion": "g"}', "not_json: Invalid control character"),
            (b'{"prompt": "\\ud800", "completion": "g"}', "half a surrogate pair"),
            (b'{"prompt": "a", "completion": "\\udfff"}', "half a surrogate pair"),
            (b'{"prompt": "a", "completion": "b", "id": "\\ud800"}', "half a surrogate pair"),
            (b'{"prompt": "\xff", "completion": "g"}', "not_utf8: byte 0xff"),
            (b'{"prompt": "\xed\xa0\x80", "completion": "g"}', "not_utf8"),
            (b"[" * 100_000 + b"]" * 100_000, "not_json"),
            (b'{"prompt": "a", "completion": "b"} {}', "not_json"),
            (b'{"prompt": "a", "completion": 3}', "completion is int, not a text"),
            (b'{"messages": {"role": "user"}}', "messages is dict, not a list"),
            (b'{"prompt": "a", "completion": "b", "id": 1.5}', "id is 1.5"),
            (b'{"prompt": "a", "completion": "b", "id": true}', "id is True"),
            (b'{"prompt": "a", "completion": "b", "id": ""}', "id is ''"),
            (b"null", "the row holds NoneType"),
        ],
        ids=range(15),
    )
    def test_a_bad_row_is_one_bad_row_among_good_ones(self, tmp_path: Path, row: bytes, said: str) -> None:
        first, *others = LINES.splitlines(keepends=True)
        found = read(first + row + b"\n" + b"".join(others), tmp_path, "f.jsonl")
        assert texts([found[0], *found[2:]]) == WHOLE
        [bad] = [each for each in found if isinstance(each, QuarantinedRow)]
        assert said in bad.reason
        assert bad.origin == f"{tmp_path}/f.jsonl:2"
        assert len(bad.reason) < 500

    def test_an_escaped_zero_and_surrogates_in_pairs_are_text(self, tmp_path: Path) -> None:
        row = b'{"prompt": "e\\u0000f", "completion": "\\ud83d\\ude42"}\n'
        assert texts(read(row, tmp_path, "f.jsonl")) == [("e\0f", "🙂")]

    @pytest.mark.parametrize("name", ["f.jsonl", "f.json"])
    def test_a_row_of_ten_megabytes_is_read(self, tmp_path: Path, name: str) -> None:
        long = {"prompt": 'x"\\' * 3_400_000, "completion": "b"}
        content = json.dumps(long).encode() + b"\n" + LINES if name == "f.jsonl" else json.dumps([long, *ROWS]).encode()
        found = read(content, tmp_path, name)
        assert texts(found[1:]) == WHOLE
        assert isinstance(found[0], Conversation)
        assert found[0].messages[0].content == long["prompt"]

    @pytest.mark.parametrize("content", [b"", b"  \n", b"[]", b" [ ] ", b'{"data": []}', b"\n\n", BOM])
    def test_nothing_is_no_rows(self, tmp_path: Path, content: bytes) -> None:
        assert read(content, tmp_path) == []


USER, YES = Message("user", "hi"), Message("assistant", "yes")
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
LARGE = pa.large_list(pa.struct({"role": pa.large_string(), "content": pa.string()}))
MAP = pa.list_(pa.map_(pa.string(), pa.string()))


class TestTools:
    """What a call or a tool holds is written as JSON again: answers, journals, the prompt itself."""

    @staticmethod
    def row(arguments: str) -> bytes:
        call = b'{"function": {"name": "f", "arguments": ' + arguments.encode() + b"}}"
        return (
            b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_calls": ['
            + call
            + b"]}]}"
        )

    @pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
    def test_arguments_with_a_number_that_json_has_not_stay_the_text_that_they_were(self, tmp_path: Path, number: str) -> None:
        (found,) = read(self.row(json.dumps(f'{{"x": {number}}}')), tmp_path)
        assert isinstance(found, Conversation)
        assert found.messages[1].tool_calls[0]["function"]["arguments"] == f'{{"x": {number}}}'
        to_json(found)

    @pytest.mark.parametrize("arguments", ['{"x": NaN}', '{"x": 1e999}', '"{\\"x\\": \\"\\\\ud800\\"}"'])
    def test_values_that_json_has_not_are_one_bad_row(self, tmp_path: Path, arguments: str) -> None:
        assert texts(read(self.row(arguments), tmp_path)) == ["wrong_type"]

    @pytest.mark.parametrize("value", [float("nan"), b"bytes", datetime(2026, 1, 1, tzinfo=UTC)])
    def test_a_table_s_values_that_json_has_not_are_one_bad_row(self, tmp_path: Path, value: Any) -> None:
        rows = [{"prompt": "q", "response": "a", "tools": [{"name": "f", "least": value}]}, {"prompt": "q", "response": "b"}]
        assert texts(read(as_parquet(pa.Table.from_pylist(rows)), tmp_path, "f.parquet")) == ["wrong_type", ("q", "b")]


class TestTables:
    @pytest.mark.parametrize(
        "table",
        [
            pa.table({"messages": pa.array([TURNS])}),
            pa.table({"messages": pa.array([TURNS], LARGE)}),
            pa.table({"messages": pa.array([[list(turn.items()) for turn in TURNS]], MAP)}),
            pa.table({"messages": pa.array([[{**TURNS[0], "tool_calls": None, "name": None}, {**TURNS[1], "tool_calls": None}]])}),
            pa.table({"conversations": pa.array([[{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]])}),
            pa.table({"prompt": pa.array(["hi"]).dictionary_encode(), "completion": pa.array(["yes"], pa.large_string())}),
            pa.table({"prompt": ["hi"], "response": ["yes"], "completion": pa.array([None], pa.string()), "blob": [b"\0"]}),
            pa.table({"prompt": pa.array([TURNS[:1]]), "completion": pa.array([TURNS[1:]])}),
        ],
        ids=["structs", "large", "maps", "nulls", "sharegpt", "dictionary", "two answers", "lists of turns"],
    )
    def test_columns_of_any_type_mean_the_same(self, tmp_path: Path, table: pa.Table) -> None:
        [found] = read(as_parquet(table), tmp_path, "f.parquet")
        assert isinstance(found, Conversation)
        assert found.messages == (USER, YES)

    def test_a_table_inside_gzip_is_the_same_table(self, tmp_path: Path) -> None:
        table = as_parquet(pa.Table.from_pylist(ROWS))
        assert texts(read(gzip.compress(table), tmp_path, "f.gz")) == texts(read(table, tmp_path, "f.bin")) == WHOLE

    def test_one_bad_cell_is_one_bad_row(self, tmp_path: Path) -> None:
        table = pa.table({"prompt": ["hi", None, "", "ho"], "completion": ["yes", "x", "x", "no"], "id": [1, 2, 3, 1]})
        found = texts(read(as_parquet(table), tmp_path, "f.parquet"))
        assert found == [("hi", "yes"), "wrong_type", "empty", "duplicate_id"]

    def test_bytes_are_no_text(self, tmp_path: Path) -> None:
        [bad] = read(as_parquet(pa.table({"prompt": [b"hi"], "completion": ["x"]})), tmp_path, "f.parquet")
        assert isinstance(bad, QuarantinedRow)
        assert "prompt is bytes, not a text" in bad.reason

    def test_a_table_without_rows_is_no_rows(self, tmp_path: Path) -> None:
        assert read(as_parquet(pa.table({"text": pa.array([], pa.string())})), tmp_path, "f.parquet") == []


SHAPES: list[dict[str, Any]] = [
    {"messages": TURNS},
    {"conversations": [{"from": "system", "value": "be"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
    {"system": "be", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
    {"prompt": "hi", "completion": "yes"},
    {"prompt": "hi"},
    {"text": "plain"},
]
BE = Message("system", "be")
MEANINGS = [(USER, YES), (BE, USER, YES), (BE, USER, YES), (USER, YES), (USER,), ()]


@pytest.mark.parametrize("form", ["f.jsonl", "f.json", "f.parquet"])
def test_every_row_of_a_file_may_have_another_shape(tmp_path: Path, form: str) -> None:
    if form == "f.parquet":
        keys = sorted({key for row in SHAPES for key in row})
        content = as_parquet(pa.table({key: [row.get(key) for row in SHAPES] for key in keys}))
    elif form == "f.json":
        content = json.dumps(SHAPES).encode()
    else:
        content = b"\n".join(json.dumps(row).encode() for row in SHAPES)
    found = read(content, tmp_path, form)
    assert [row.messages for row in found if isinstance(row, Conversation)] == MEANINGS
    assert isinstance(found[-1], Conversation)
    assert found[-1].text == "plain"


class TestManyFiles:
    def test_a_file_that_several_patterns_name_is_read_once(self, tmp_path: Path) -> None:
        for name in ("a.jsonl", "b.jsonl"):
            (tmp_path / name).write_bytes(LINES)
        found = list(
            read_conversations([f"{tmp_path}/b.jsonl", f"{tmp_path}/*.jsonl", f"{tmp_path}/a.*"], limit=None, system_prompt=None)
        )
        assert [row.origin.rpartition("/")[2] for row in found] == [f"{name}.jsonl:{row}" for name in "ba" for row in (1, 2, 3)]
        assert texts(found) == WHOLE * 2

    def test_files_of_different_formats_are_one_stream(self, tmp_path: Path) -> None:
        table = as_parquet(pa.Table.from_pylist(ROWS))
        contents = {"a.json": LIST, "b.jsonl.gz": gzip.compress(LINES), "c": table, "d.json": OBJECT}
        for name, content in contents.items():
            (tmp_path / name).write_bytes(content)
        assert texts(list(read_conversations([f"{tmp_path}/*"], limit=None, system_prompt=None))) == WHOLE * 4

    @pytest.mark.parametrize("pattern", ["*.parquet", "[xyz].jsonl", "**/nothing", "?"])
    def test_a_pattern_that_matches_nothing_is_an_error(self, tmp_path: Path, pattern: str) -> None:
        (tmp_path / "a.jsonl").write_bytes(LINES)
        with pytest.raises(StorageError, match="no file matches"):
            list(read_conversations([f"{tmp_path}/a.jsonl", f"{tmp_path}/{pattern}"], limit=None, system_prompt=None))
