"""Reading JSONL conversations: every line becomes one conversation or one named bad row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import DataConfig
from dflash.data.conversations import (
    configured_conversations,
    parse_row,
    read_conversations,
    synthetic_conversations,
    with_system_prompt,
)
from dflash.data.quarantine import BadRowError
from dflash.data.synthetic import generate_conversations
from dflash.errors import StorageError
from dflash.records import Conversation, Message, QuarantinedRow

USER, ANSWER = Message("user", "hi"), Message("assistant", "hello")


def written(path: Path, *rows: Any) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def read(*files: str, limit: int | None = None, system_prompt: str | None = None) -> list[Conversation | QuarantinedRow]:
    return list(read_conversations(files, limit=limit, system_prompt=system_prompt))


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"conversations": [{"from": "user", "value": "hi"}, {"from": "assistant", "value": "hello"}]},
        {"prompt": "hi", "completion": "hello"},
        {"prompt": "hi", "reference": "hello"},
        {"prompt": "hi", "completion": "hello", "reference": "not this one"},
    ],
    ids="+".join,
)
def test_the_usual_shapes_mean_the_same(row: dict[str, Any]) -> None:
    assert parse_row(json.dumps(row), origin="x:1", default_id="d").messages == (USER, ANSWER)


def test_a_prompt_alone_waits_for_its_answer() -> None:
    assert parse_row('{"prompt": "hi"}', origin="x:1", default_id="d").messages == (USER,)


def test_identity_and_label(tmp_path: Path) -> None:
    file = written(
        tmp_path / "a.jsonl",
        {"prompt": "hi", "id": "first", "source": "gsm8k"},
        {"prompt": "hi", "id": 17, "kind": "code", "source": "x"},
        {"prompt": "hi"},
    )
    assert [(row.id, row.kind) for row in read(file)] == [("first", "gsm8k"), ("17", "code"), ("a.jsonl:3", "file")]
    assert [row.origin for row in read(file)] == [f"{file}:1", f"{file}:2", f"{file}:3"]


def test_an_id_without_a_name_does_not_depend_on_the_folder(tmp_path: Path) -> None:
    ids = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        ids.append([row.id for row in read(written(folder / "a.jsonl", {"prompt": "hi"}))])
    assert ids[0] == ids[1] == ["a.jsonl:1"]


def test_files_of_one_name_get_different_ids(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    files = [written(tmp_path / name / "a.jsonl", {"prompt": "hi"}) for name in ("one", "two")]
    assert len({row.id for row in read(*files) if isinstance(row, Conversation)}) == 2


MANY_BRACKETS = "[" * 100_000
BAD_ROWS = {
    "not json": ("{oops", "not_json", "line 1 column 2"),
    "half a line": ('{"prompt": "h', "not_json", "Unterminated"),
    "nested too deeply": (MANY_BRACKETS, "not_json", "recursion"),
    "a list": ("[1]", "wrong_type", "list, not an object"),
    "none of the keys": ('{"text": "hi"}', "wrong_type", "['text']"),
    "messages no list": ('{"messages": "hi"}', "wrong_type", "messages is str"),
    "turn no object": ('{"messages": ["hi"]}', "wrong_type", "messages[0] is str"),
    "unknown role": ('{"messages": [{"role": "tool", "content": "x"}]}', "wrong_type", "'tool'"),
    "role missing": ('{"messages": [{"content": "x"}]}', "wrong_type", "messages[0].role is None"),
    "content no text": ('{"messages": [{"role": "user", "content": 7}]}', "wrong_type", "messages[0].content is int"),
    "prompt no text": ('{"prompt": ["hi"]}', "wrong_type", "prompt is list"),
    "half a surrogate pair": ('{"prompt": "\\ud83d"}', "wrong_type", "surrogate"),
    "id no text": ('{"prompt": "hi", "id": [1]}', "wrong_type", "id is [1]"),
    "id empty": ('{"prompt": "hi", "id": ""}', "wrong_type", "id is ''"),
    "no turn": ('{"messages": []}', "empty", "no turn"),
    "empty prompt": ('{"prompt": "  "}', "empty", "user turn 0 has no text"),
    "system only": ('{"messages": [{"role": "system", "content": "x"}]}', "turn_order", "system turn only"),
    "answer first": ('{"messages": [{"role": "assistant", "content": "x"}]}', "turn_order", "expected user"),
    "two user turns": (
        '{"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]}',
        "turn_order",
        "turn 1 is of the role user, expected assistant",
    ),
}


@pytest.mark.parametrize(("line", "code", "detail"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_named_by_file_line_and_reason(tmp_path: Path, line: str, code: str, detail: str) -> None:
    file = written(tmp_path / "a.jsonl", {"prompt": "hi"}, line, {"prompt": "ho"})
    good, bad, more = read(file)
    assert isinstance(good, Conversation)
    assert isinstance(more, Conversation)
    assert isinstance(bad, QuarantinedRow)
    assert bad.origin == f"{file}:2"
    assert bad.reason.startswith(f"{code}: ")
    assert detail in bad.reason
    with pytest.raises(BadRowError, match=code) as caught:
        parse_row(line, origin="some.jsonl:2", default_id="d")
    assert str(caught.value).startswith("some.jsonl:2")


def test_a_repeated_id_is_a_bad_row_that_names_the_first(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", {"prompt": "hi", "id": "x"}, {"prompt": "ho", "id": "x"})
    bad = read(file)[1]
    assert isinstance(bad, QuarantinedRow)
    assert bad.reason == f"duplicate_id: id 'x' was used before at {file}:1"


def test_blank_lines_are_no_rows_but_count_as_lines(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", "", {"prompt": "hi"}, "  ", {"prompt": "ho"})
    assert [row.origin for row in read(file)] == [f"{file}:2", f"{file}:4"]


def test_an_empty_answer_is_read_because_it_may_be_written_anew() -> None:
    assert parse_row('{"prompt": "hi", "completion": ""}', origin="x:1", default_id="d").messages[1].content == ""


def test_the_limit_counts_conversations_not_bad_rows(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", "bad", *({"prompt": f"{i}"} for i in range(5)))
    rows = read(file, limit=2)
    assert [type(row).__name__ for row in rows] == ["QuarantinedRow", "Conversation", "Conversation"]
    assert len(read(file, limit=50)) == 6


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"nowhere\.jsonl"):
        read(str(tmp_path / "nowhere.jsonl"))


def test_a_system_prompt_is_put_before_conversations_that_have_none(tmp_path: Path) -> None:
    own = {"messages": [{"role": "system", "content": "mine"}, {"role": "user", "content": "hi"}]}
    file = written(tmp_path / "a.jsonl", {"prompt": "hi"}, own)
    rows = read(file, system_prompt="theirs")
    assert [row.messages[0].content for row in rows if isinstance(row, Conversation)] == ["theirs", "mine"]
    assert with_system_prompt((USER,), None) == (USER,)


def test_synthetic_conversations_keep_what_the_generator_says() -> None:
    chats = list(generate_conversations(seed=3, count=20, split="train"))
    rows = list(synthetic_conversations(seed=3, count=20, split="train", system_prompt=None))
    assert [row.id for row in rows] == [chat.id for chat in chats]
    assert [tuple((m.role, m.content) for m in row.messages) for row in rows] == [chat.messages for chat in chats]
    assert {row.kind for row in rows} == {chat.kind for chat in chats}
    prompted = list(synthetic_conversations(seed=3, count=20, split="train", system_prompt="Be kind."))
    assert all(row.messages[0].role == "system" for row in prompted)


def test_the_configured_source_is_read(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", {"prompt": "hi"}, {"prompt": "ho"})
    from_files = DataConfig(source="files", files=(file,), num_conversations=1, system_prompt="Be kind.")
    assert [len(row.messages) for row in configured_conversations(from_files) if isinstance(row, Conversation)] == [2]
    synthetic = DataConfig(source="synthetic", num_conversations=4, seed=1)
    expected = synthetic_conversations(seed=1, count=4, split="train", system_prompt=None)
    assert list(configured_conversations(synthetic)) == list(expected)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "hi", "user", "assistant", "system"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "from", "value", "messages", "prompt", "id"]), inner, max_size=4)
    ),
    max_leaves=10,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(value=JSON, prefix=st.sampled_from(["", "{", "\x00"]))
def test_any_line_gives_a_well_formed_conversation_or_a_bad_row(value: Any, prefix: str) -> None:
    try:
        row = parse_row(prefix + json.dumps(value), origin="x:1", default_id="d")
    except BadRowError:
        return
    turns = row.messages[1:] if row.messages[0].role == "system" else row.messages
    assert [m.role for m in turns] == ["user", "assistant"] * (len(turns) // 2) + ["user"] * (len(turns) % 2)
    assert all(m.content.strip() for m in turns[::2])
