"""Reading conversations: every row becomes one conversation or one named bad row."""

from __future__ import annotations

import itertools
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
    assert parse_row(json.dumps(row).encode(), origin="x:1", default_id="d").messages == (USER, ANSWER)


def test_a_prompt_alone_waits_for_its_answer() -> None:
    assert parse_row(b'{"prompt": "hi"}', origin="x:1", default_id="d").messages == (USER,)


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
    "none of the keys": ('{"words": "hi"}', "wrong_type", "['words']"),
    "messages no list": ('{"messages": "hi"}', "wrong_type", "messages is str"),
    "turn no object": ('{"messages": ["hi"]}', "wrong_type", "messages[0] is str"),
    "unknown role": ('{"messages": [{"role": "narrator", "content": "x"}]}', "wrong_type", "'narrator'"),
    "role missing": ('{"messages": [{"content": "x"}]}', "wrong_type", "messages[0].role is None"),
    "content no text": ('{"messages": [{"role": "user", "content": 7}]}', "wrong_type", "messages[0].content is int"),
    "prompt no text": ('{"prompt": 7}', "wrong_type", "prompt is int"),
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
        parse_row(line.encode(), origin="some.jsonl:2", default_id="d")
    assert str(caught.value).startswith("some.jsonl:2")


def test_a_repeated_id_is_a_bad_row(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", {"prompt": "hi", "id": "x"}, {"prompt": "ho", "id": "x"})
    bad = read(file)[1]
    assert isinstance(bad, QuarantinedRow)
    assert bad.reason == "duplicate_id: id 'x' was used before in this file"


def test_blank_lines_are_no_rows_but_count_as_lines(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", "", {"prompt": "hi"}, "  ", {"prompt": "ho"})
    assert [row.origin for row in read(file)] == [f"{file}:2", f"{file}:4"]


def test_an_empty_answer_is_read_because_it_may_be_written_anew() -> None:
    assert parse_row(b'{"prompt": "hi", "completion": ""}', origin="x:1", default_id="d").messages[1].content == ""


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


def parsed(row: Any) -> Conversation:
    return parse_row(json.dumps(row).encode(), origin="x:1", default_id="d")


def turns(*roles: str, key: str = "role", text: str = "content") -> list[dict[str, Any]]:
    return [{key: role, text: f"{role} {place}"} for place, role in enumerate(roles)]


@pytest.mark.parametrize(
    ("names", "roles"),
    [
        (("developer", "human", "model", "human", "bot"), ("system", "user", "assistant", "user", "assistant")),
        (("system", "user", "gpt", "observation", "gpt"), ("system", "user", "assistant", "tool", "assistant")),
        (
            ("user", "assistant", "tool", "function", "assistant", "user"),
            ("user", "assistant", "tool", "tool", "assistant", "user"),
        ),
    ],
)
def test_roles_have_synonyms(names: tuple[str, ...], roles: tuple[str, ...]) -> None:
    assert tuple(message.role for message in parsed({"messages": turns(*names)}).messages) == roles
    other_keys = {"conversations": turns(*names, key="from", text="value")}
    assert parsed(other_keys).messages == parsed({"messages": turns(*names)}).messages
    mixed = {"conversations": turns(*names)}
    assert parsed(mixed).messages == parsed(other_keys).messages


@pytest.mark.parametrize(
    ("roles", "detail"),
    [
        (("user", "assistant", "assistant"), "turn 2 is of the role assistant, expected user or tool"),
        (("user", "tool"), "turn 1 is of the role tool, expected assistant"),
        (("user", "assistant", "tool", "user"), "turn 3 is of the role user, expected assistant or tool"),
        (("user", "assistant", "system", "user"), "turn 2 is of the role system"),
        (("system", "developer", "user"), "turn 0 is of the role system, expected user"),
        (("tool", "user"), "turn 0 is of the role tool, expected user"),
    ],
)
def test_turns_out_of_order_are_refused(roles: tuple[str, ...], detail: str) -> None:
    with pytest.raises(BadRowError, match=detail) as caught:
        parsed({"messages": turns(*roles)})
    assert caught.value.row.reason.startswith("turn_order: ")


def test_parts_of_text_are_joined_and_other_parts_refused() -> None:
    parts = [{"type": "text", "text": "one"}, "two", {"type": "input_text", "text": "three"}]
    assert parsed({"messages": [{"role": "user", "content": parts}]}).messages[0].content == "one\ntwo\nthree"
    image = [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(BadRowError, match=r"messages\[0\]\.content\[1\] is a part of the type 'image_url'"):
        parsed({"messages": [{"role": "user", "content": image}]})
    with pytest.raises(BadRowError, match=r"content\[0\] is int"):
        parsed({"messages": [{"role": "user", "content": [7]}]})


@pytest.mark.parametrize(
    ("answer", "content", "reasoning"),
    [
        ({"content": "two", "reasoning_content": "so"}, "two", "so"),
        ({"content": "two", "reasoning": "so"}, "two", "so"),
        ({"content": "two", "thinking": "so", "reasoning": None}, "two", "so"),
        ({"content": "two", "reasoning": ""}, "two", None),
        ({"content": [{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "two"}]}, "two", "so"),
        ({"content": "<think>so</think>two"}, "<think>so</think>two", None),
        ({"content": "<think>so</think>two", "reasoning": "again"}, "<think>so</think>two", None),
        ({"content": None, "reasoning": "so"}, "", "so"),
        ({"content": None}, "", None),
    ],
)
def test_reasoning_is_kept_apart_or_where_it_stands(answer: dict[str, Any], content: str, reasoning: str | None) -> None:
    message = parsed({"messages": [{"role": "user", "content": "2?"}, {"role": "assistant", **answer}]}).messages[1]
    assert (message.content, message.reasoning) == (content, reasoning)


def test_reasoning_must_be_text() -> None:
    with pytest.raises(BadRowError, match=r"messages\[1\]\.reasoning is list"):
        parsed({"messages": [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "2", "reasoning": ["so"]}]})


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"day": 2}}}


@pytest.mark.parametrize(
    "answer",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": '{"day": 2}'}}]},
        {"role": "assistant", "content": "", "tool_calls": '[{"name": "weather", "arguments": {"day": 2}}]'},
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"day": 2}'}},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"day": 2}}'},
    ],
)
def test_tool_calls_come_in_many_ways_and_mean_the_same(answer: dict[str, Any]) -> None:
    row = {"messages": [{"role": "user", "content": "fine?"}, answer, {"role": "tool", "content": "7", "name": "weather"}]}
    messages = parsed(row).messages
    assert messages[1] == Message("assistant", "", tool_calls=(CALL,))
    assert messages[2] == Message("tool", "7", name="weather")


def test_a_call_with_plain_text_or_an_id_keeps_it() -> None:
    calls = [{"id": "c1", "function": {"name": "say", "arguments": "hello"}}, {"name": "stop"}]
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": calls}]}
    assert parsed(row).messages[1].tool_calls == (
        {"id": "c1", "type": "function", "function": {"name": "say", "arguments": "hello"}},
        {"type": "function", "function": {"name": "stop", "arguments": {}}},
    )


@pytest.mark.parametrize(
    ("tools", "detail"),
    [
        (7, "tools is int, not a list"),
        ([7], r"tools\[0\] is int"),
        ([{}], r"tools\[0\] has no name"),
        ("{oops", "tools is no JSON"),
    ],
)
def test_tools_that_are_none_are_refused(tools: Any, detail: str) -> None:
    with pytest.raises(BadRowError, match=detail):
        parsed({"prompt": "hi", "tools": tools})


@pytest.mark.parametrize("tools", [[{"name": "a"}], '[{"type": "function", "function": {"name": "a"}}]', {"name": "a"}])
def test_tools_come_in_many_ways_and_mean_the_same(tools: Any) -> None:
    expected = ({"type": "function", "function": {"name": "a"}},)
    assert parsed({"prompt": "hi", "tools": tools}).tools == expected
    assert parsed({"prompt": "hi", "functions": tools}).tools == expected


def test_a_prompt_may_be_turns_and_a_system_text_may_stand_beside_them() -> None:
    row = {
        "system": "be kind",
        "prompt": turns("user", "assistant", "user"),
        "completion": [{"role": "assistant", "content": "so"}],
    }
    assert [message.role for message in parsed(row).messages] == ["system", "user", "assistant", "user", "assistant"]
    assert parsed({"prompt": "hi", "response": "ho"}).messages[1].content == "ho"
    own = parsed({"system": "other", "messages": turns("system", "user")}).messages
    assert [message.content for message in own] == ["system 0", "user 1"]


def test_plain_text_has_no_turns_and_takes_no_system_prompt(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", {"text": "once upon a time", "source": "books"}, {"text": " "}, {"text": 7})
    text, empty, number = read(file, system_prompt="be kind")
    assert isinstance(text, Conversation)
    assert (text.text, text.messages, text.kind) == ("once upon a time", (), "books")
    assert isinstance(empty, QuarantinedRow)
    assert empty.reason == "empty: text holds nothing"
    assert isinstance(number, QuarantinedRow)


def test_a_value_that_json_lacks_but_python_writes_spoils_nothing() -> None:
    assert parse_row(b'{"prompt": "hi", "score": NaN}', origin="x:1", default_id="d").messages == (USER,)


def test_patterns_name_many_files(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        written(tmp_path / name, {"prompt": name})
    rows = read(str(tmp_path / "*.jsonl"))
    assert [row.id for row in rows if isinstance(row, Conversation)] == ["a.jsonl:1", "b.jsonl:1"]
    with pytest.raises(StorageError, match="no file matches"):
        read(str(tmp_path / "*.parquet"))


def test_files_may_number_their_rows_alike(tmp_path: Path) -> None:
    one = written(tmp_path / "a.jsonl", {"prompt": "hi", "id": 1}, {"prompt": "ho", "id": "b.jsonl:2"})
    two = written(tmp_path / "b.jsonl", {"prompt": "hi", "id": 1}, {"prompt": "ho"}, {"prompt": "hu", "id": 3})
    assert [row.id for row in read(one, two) if isinstance(row, Conversation)] == [
        "1",
        "b.jsonl:2",
        "b.jsonl/1",
        "b.jsonl/b.jsonl:2",
        "3",
    ]
    taken = written(tmp_path / "c.jsonl", {"prompt": "hi", "id": "d.jsonl/1"}, {"prompt": "hi", "id": 1})
    last = written(tmp_path / "d.jsonl", {"prompt": "hi", "id": 1})
    [bad] = [row for row in read(taken, last) if isinstance(row, QuarantinedRow)]
    assert bad == QuarantinedRow(f"{last}:1", "duplicate_id: id 'd.jsonl/1' was used before in this file")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "hi", "user", "assistant", "system", "tool"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "messages", "prompt", "id", "text", "tools", "tool_calls"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(value=JSON, prefix=st.sampled_from(["", "{", "\x00"]))
def test_any_line_gives_a_well_formed_conversation_or_a_bad_row(value: Any, prefix: str) -> None:
    try:
        row = parse_row((prefix + json.dumps(value)).encode(), origin="x:1", default_id="d")
    except BadRowError:
        return
    if row.text is not None:
        assert row.messages == ()
        return
    said = row.messages[1:] if row.messages[0].role == "system" else row.messages
    assert said[0].role == "user"
    allowed = {("user", "assistant"), ("assistant", "user"), ("assistant", "tool"), ("tool", "tool"), ("tool", "assistant")}
    assert all((one.role, other.role) in allowed for one, other in itertools.pairwise(said))
    assert all(m.content.strip() for m in said if m.role == "user")
