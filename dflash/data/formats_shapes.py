"""One decoded row becomes one conversation: the usual shapes, roles and parts, or one named reason why not.

Shapes, the first that is there: `messages` (role, content); ShareGPT `conversations` (from, value); `prompt` with
`completion`, `response` or `reference` as the answer, each a text or a list of messages; plain `text`. `id`, `kind` or
`source` as a label, `system` and `tools` are optional everywhere. A key that holds null counts as absent.

On purpose:
- Roles have synonyms: developer is system; human is user; gpt, model, bot are assistant; function, observation, ipython are
  tool; function_call is an assistant turn that makes a call.
- Content that is a list of parts is joined by line breaks, as servers do; parts that are no text (images) are a bad row.
- Reasoning in a field of its own (`reasoning_content`, `reasoning`, `thinking`) is kept apart; reasoning inside the content
  (`<think>...</think>`) stays there, and then wins over the field. On other turns than the assistant's it is ignored.
- Arguments of a tool call that are JSON text become the object that they stand for, as chat templates expect.
- Two turns of one role in a row are a bad row (but for tool turns, which answer parallel calls): joining them would make up
  a turn that nobody wrote. So is a system turn that is not the first.
- A user turn without text is a bad row. An assistant turn without any is read: the target may write it anew; if not, it
  carries no loss.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from dflash.data.formats_tools import tool_calls_of, tools_of
from dflash.data.quarantine import BadRowError
from dflash.records import Conversation, Message, Role

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_ANSWER_KEYS = ("completion", "response", "reference")
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_FOLLOWERS: dict[Role | None, tuple[Role, ...]] = {
    None: ("user",),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


def conversation_of(row: Mapping[str, Any], *, origin: str, default_id: str) -> Conversation:
    """The conversation that a decoded row stands for.

    Raises:
        BadRowError: it is no usable conversation; names the origin and the offending value.
    """
    label = row.get("kind") or row.get("source")
    kind = label if isinstance(label, str) and label else "file"
    identifier = _identifier(row, default_id, origin)
    messages = tuple(_messages(row, origin))
    if not messages and row.get("text") is not None and not _has_turns(row):
        text = _text(row["text"], "text", origin)
        if not text.strip():
            raise BadRowError("empty", "text holds nothing", origin=origin)
        return Conversation(id=identifier, messages=(), origin=origin, kind=kind, text=text)
    _check_turns(messages, origin)
    return Conversation(id=identifier, messages=messages, origin=origin, kind=kind, tools=tools_of(row, origin))


def _identifier(row: Mapping[str, Any], default_id: str, origin: str) -> str:
    identifier = row.get("id")
    if identifier is None:
        return default_id
    if isinstance(identifier, bool) or not isinstance(identifier, str | int) or identifier == "":
        raise BadRowError("wrong_type", f"id is {identifier!r}, not a text or a whole number", origin=origin)
    return str(identifier)


def _has_turns(row: Mapping[str, Any]) -> bool:
    return any(row.get(key) is not None for key in ("messages", "conversations", "prompt"))


def _messages(row: Mapping[str, Any], origin: str) -> Iterator[Message]:
    for key in ("messages", "conversations", "prompt"):
        if row.get(key) is not None:
            break
    else:
        if row.get("text") is None:
            keys = sorted(key for key in row if row[key] is not None)
            raise BadRowError(
                "wrong_type", f"none of messages, conversations, prompt and text among the keys {keys}", origin=origin
            )
        return
    if key == "prompt":
        turns = _part(row, "prompt", "user", origin)
        answer = next((name for name in _ANSWER_KEYS if row.get(name) is not None), None)
        if answer is not None:
            turns += _part(row, answer, "assistant", origin)
    else:
        turns = list(_turns(row[key], name=key, origin=origin))
    system = row.get("system")
    if system is not None and system != "" and (not turns or turns[0].role != "system"):
        yield Message(role="system", content=_text(system, "system", origin))
    yield from turns


def _part(row: Mapping[str, Any], key: str, role: Role, origin: str) -> list[Message]:
    if isinstance(row[key], list):
        return list(_turns(row[key], name=key, origin=origin))
    return [Message(role=role, content=_text(row[key], key, origin))]


def _turns(turns: Any, *, name: str, origin: str) -> Iterator[Message]:
    if not isinstance(turns, list):
        raise BadRowError("wrong_type", f"{name} is {type(turns).__name__}, not a list", origin=origin)
    for index, turn in enumerate(turns):
        where = f"{name}[{index}]"
        if not isinstance(turn, dict):
            raise BadRowError("wrong_type", f"{where} is {type(turn).__name__}, not an object", origin=origin)
        yield _turn(turn, where, origin)


def _turn(turn: Mapping[str, Any], where: str, origin: str) -> Message:
    role_key = "from" if turn.get("role") is None and "from" in turn else "role"
    said = turn.get(role_key)
    if not isinstance(said, str) or said not in ROLES:
        raise BadRowError("wrong_type", f"{where}.{role_key} is {said!r}, not one of {', '.join(ROLES)}", origin=origin)
    role = ROLES[said]
    content_key = "value" if turn.get("content") is None and "value" in turn else "content"
    content, thoughts = _content(turn.get(content_key), f"{where}.{content_key}", role, origin)
    name = turn.get("name")
    if role != "assistant":
        return Message(role=role, content=content, name=name if isinstance(name, str) and name else None)
    if said == "function_call":
        call = {"tool_calls": [_json_object(content, f"{where}.{content_key}", origin)]}
        return Message(role=role, content="", tool_calls=tool_calls_of(call, where, origin))
    reasoning = thoughts if thoughts is not None else _reasoning(turn, where, origin)
    return Message(
        role=role,
        content=content,
        reasoning=None if "</think>" in content else reasoning,
        tool_calls=tool_calls_of(turn, where, origin),
    )


def _content(value: Any, where: str, role: Role, origin: str) -> tuple[str, str | None]:
    """The text of a turn, and its reasoning if that comes as a part."""
    if isinstance(value, str):
        return _text(value, where, origin), None
    if value is None and role == "assistant":
        return "", None
    if not isinstance(value, list):
        raise BadRowError("wrong_type", f"{where} is {type(value).__name__}, not a text", origin=origin)
    texts: list[str] = []
    thoughts: list[str] = []
    for index, part in enumerate(value):
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind == "thinking" and role == "assistant":
            thoughts.append(_text(part.get("thinking"), f"{where}[{index}].thinking", origin))
        elif kind in _TEXT_PARTS:
            texts.append(_text(part.get("text") if isinstance(part, dict) else part, f"{where}[{index}]", origin))
        else:
            raise BadRowError("wrong_type", f"{where}[{index}] is a part of the type {kind!r}, not a text", origin=origin)
    return "\n".join(texts), "\n".join(thoughts) if thoughts else None


def _reasoning(turn: Mapping[str, Any], where: str, origin: str) -> str | None:
    key = next((name for name in _REASONING_KEYS if turn.get(name)), None)
    return None if key is None else _text(turn[key], f"{where}.{key}", origin)


def _json_object(text: str, where: str, origin: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRowError("wrong_type", f"{where} is no JSON: {error}", origin=origin) from error
    if not isinstance(value, dict):
        raise BadRowError("wrong_type", f"{where} holds {type(value).__name__}, not an object", origin=origin)
    return value


def _text(value: Any, where: str, origin: str) -> str:
    if not isinstance(value, str):
        raise BadRowError("wrong_type", f"{where} is {type(value).__name__}, not a text", origin=origin)
    return value


def _check_turns(messages: tuple[Message, ...], origin: str) -> None:
    if not messages:
        raise BadRowError("empty", "the conversation has no turn", origin=origin)
    turns = messages[1:] if messages[0].role == "system" else messages
    if not turns:
        raise BadRowError("turn_order", "the conversation has a system turn only", origin=origin)
    before: Role | None = None
    for index, message in enumerate(turns):
        expected = _FOLLOWERS[before]
        if message.role not in expected:
            raise BadRowError(
                "turn_order", f"turn {index} is of the role {message.role}, expected {' or '.join(expected)}", origin=origin
            )
        if message.role == "user" and not message.content.strip():
            raise BadRowError("empty", f"user turn {index} has no text", origin=origin)
        before = message.role
