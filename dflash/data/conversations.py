"""Reading conversations: JSONL in the three usual shapes, or the synthetic generator; one row in, one value out.

Shapes: `{"messages": [{"role", "content"}]}`, ShareGPT `{"conversations": [{"from", "value"}]}`, and
`{"prompt"}` with an optional `completion` or `reference` as the answer. `id`, and `kind` or `source` as a label,
are optional everywhere.

Invariant: every non-blank line yields exactly one `Conversation` or one `QuarantinedRow`; a yielded conversation is an
optional system turn followed by user and assistant turns in alternation, beginning with a user turn, and its id is
unique in the stream. Whether a bad row stops the build is the caller's decision.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from dflash.config import DataConfig
from dflash.data.quarantine import BadRowCode, BadRowError
from dflash.data.synthetic import Split, generate_conversations
from dflash.errors import DataError
from dflash.records import Conversation, Message, QuarantinedRow, Role
from dflash.storage import read_lines

_ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}


def read_conversations(
    files: Sequence[str], *, limit: int | None, system_prompt: str | None
) -> Iterator[Conversation | QuarantinedRow]:
    """Stream the conversations of JSONL files in order.

    Args:
        files: local paths or `s3://` objects.
        limit: conversations to take (bad rows not counted); all if None.
        system_prompt: system turn put before conversations that have none; None adds none.

    Yields:
        A conversation, or the bad row with its `file:line` and reason.

    Raises:
        StorageError: a file is missing or not UTF-8.
    """
    rows = _rows(files, system_prompt)
    if limit is None:
        yield from rows
        return
    taken = 0
    while taken < limit:
        row = next(rows, None)
        if row is None:
            return
        taken += isinstance(row, Conversation)
        yield row


def synthetic_conversations(*, seed: int, count: int, split: Split, system_prompt: str | None) -> Iterator[Conversation]:
    """Stream the synthetic generator's conversations as records, answers of the generator included."""
    for chat in generate_conversations(seed=seed, count=count, split=split):
        messages = tuple(Message(role=_ROLES[role], content=content) for role, content in chat.messages)
        yield Conversation(
            id=chat.id,
            messages=with_system_prompt(messages, system_prompt),
            origin=f"synthetic:{chat.id}",
            kind=chat.kind,
        )


def configured_conversations(data: DataConfig) -> Iterator[Conversation | QuarantinedRow]:
    """Stream the training conversations that a configuration names.

    Raises:
        StorageError: a file is missing or not UTF-8.
        DataError: a synthetic source without a number of conversations.
    """
    if data.source == "files":
        return read_conversations(data.files, limit=data.num_conversations, system_prompt=data.system_prompt)
    if data.num_conversations is None:
        raise DataError("a synthetic source has no end of its own", remedy="set data.num_conversations")
    return synthetic_conversations(seed=data.seed, count=data.num_conversations, split="train", system_prompt=data.system_prompt)


def with_system_prompt(messages: tuple[Message, ...], system_prompt: str | None) -> tuple[Message, ...]:
    """The same turns, after a system turn if they have none and one is wanted."""
    if system_prompt is None or (messages and messages[0].role == "system"):
        return messages
    return (Message(role="system", content=system_prompt), *messages)


def parse_row(line: str, *, origin: str, default_id: str) -> Conversation:
    """Parse one JSONL line.

    Raises:
        BadRowError: the line is no usable conversation; names the origin and the offending value.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRowError("not_json", f"{error}", origin=origin) from error
    if not isinstance(row, dict):
        raise BadRowError("wrong_type", f"the line holds {type(row).__name__}, not an object", origin=origin)
    messages = tuple(_messages(row, origin))
    _check_turns(messages, origin)
    label = row.get("kind", row.get("source"))
    return Conversation(
        id=_identifier(row, default_id, origin),
        messages=messages,
        origin=origin,
        kind=label if isinstance(label, str) and label else "file",
    )


def _rows(files: Sequence[str], system_prompt: str | None) -> Iterator[Conversation | QuarantinedRow]:
    names = [PurePosixPath(uri).name for uri in files]
    first_seen: dict[str, str] = {}
    for uri, name in zip(files, names, strict=True):
        label = name if names.count(name) == 1 else uri
        for number, line in enumerate(read_lines(uri), start=1):
            if not line.strip():
                continue
            origin = f"{uri}:{number}"
            try:
                row = parse_row(line, origin=origin, default_id=f"{label}:{number}")
                if row.id in first_seen:
                    raise BadRowError("duplicate_id", f"id {row.id!r} was used before at {first_seen[row.id]}", origin=origin)
            except BadRowError as error:
                yield error.row
                continue
            first_seen[row.id] = origin
            yield Conversation(id=row.id, messages=with_system_prompt(row.messages, system_prompt), origin=origin, kind=row.kind)


def _identifier(row: Mapping[str, Any], default_id: str, origin: str) -> str:
    identifier = row.get("id", default_id)
    if isinstance(identifier, bool) or not isinstance(identifier, str | int) or identifier == "":
        raise BadRowError("wrong_type", f"id is {identifier!r}, not a text or a whole number", origin=origin)
    return str(identifier)


def _messages(row: Mapping[str, Any], origin: str) -> Iterator[Message]:
    if "messages" in row:
        yield from _turns(row["messages"], keys=("role", "content"), name="messages", origin=origin)
    elif "conversations" in row:
        yield from _turns(row["conversations"], keys=("from", "value"), name="conversations", origin=origin)
    elif "prompt" in row:
        yield Message(role="user", content=_text(row["prompt"], "prompt", origin))
        answer_key = "completion" if "completion" in row else "reference"
        if row.get(answer_key) is not None:
            yield Message(role="assistant", content=_text(row[answer_key], answer_key, origin))
    else:
        raise BadRowError("wrong_type", f"none of messages, conversations and prompt among the keys {sorted(row)}", origin=origin)


def _turns(turns: Any, *, keys: tuple[str, str], name: str, origin: str) -> Iterator[Message]:
    if not isinstance(turns, list):
        raise BadRowError("wrong_type", f"{name} is {type(turns).__name__}, not a list", origin=origin)
    role_key, text_key = keys
    for index, turn in enumerate(turns):
        where = f"{name}[{index}]"
        if not isinstance(turn, dict):
            raise BadRowError("wrong_type", f"{where} is {type(turn).__name__}, not an object", origin=origin)
        role = turn.get(role_key)
        if not isinstance(role, str) or role not in _ROLES:
            raise BadRowError("wrong_type", f"{where}.{role_key} is {role!r}, not one of {', '.join(_ROLES)}", origin=origin)
        yield Message(role=_ROLES[role], content=_text(turn.get(text_key), f"{where}.{text_key}", origin))


def _text(value: Any, where: str, origin: str) -> str:
    if not isinstance(value, str):
        raise BadRowError("wrong_type", f"{where} is {type(value).__name__}, not a text", origin=origin)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRowError("wrong_type", f"{where} holds half a surrogate pair: no valid text", origin=origin) from error
    return value


def _check_turns(messages: tuple[Message, ...], origin: str) -> None:
    if not messages:
        raise BadRowError("empty", "the conversation has no turn", origin=origin)
    code: BadRowCode = "turn_order"
    turns = messages[1:] if messages[0].role == "system" else messages
    if not turns:
        raise BadRowError(code, "the conversation has a system turn only", origin=origin)
    for index, message in enumerate(turns):
        expected: Role = "assistant" if index % 2 else "user"
        if message.role != expected:
            raise BadRowError(code, f"turn {index} is of the role {message.role}, expected {expected}", origin=origin)
        if expected == "user" and not message.content.strip():
            raise BadRowError("empty", f"user turn {index} has no text", origin=origin)
