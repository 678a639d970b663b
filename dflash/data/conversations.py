"""Reading conversations: files in the usual formats and shapes, or the synthetic generator; one row in, one value out.

`formats` tells the file formats, `formats_shapes` the shapes of rows and what is done about roles, reasoning, tools and
empty turns.

Invariant: every row (of JSON lines: every line that is not blank) yields exactly one `Conversation` or one `QuarantinedRow`;
a yielded conversation is plain text, or an optional system turn followed by turns in order, beginning with a user turn, and
its id is unique in the file and in the stream. Whether a bad row stops the build is the caller's decision.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import PurePosixPath
from typing import Any

import msgspec

from dflash.config import DataConfig
from dflash.data.formats import RawBatch, RawRow, read_raw_batches
from dflash.data.formats_json import MAX_ROW_BYTES, OversizedRow
from dflash.data.formats_shapes import ROLES, conversation_of
from dflash.data.formats_tools import without_nulls
from dflash.data.quarantine import BadRowError
from dflash.data.seen_ids import SeenIds, id_digests
from dflash.data.synthetic import Split, generate_conversations
from dflash.errors import DataError
from dflash.records import Conversation, Message, QuarantinedRow
from dflash.storage.compression import expand

READ_ROWS = 1000
"""Rows read ahead by one stream."""

_decode = msgspec.json.Decoder().decode


def read_source(uri: str, *, label: str, system_prompt: str | None) -> Iterator[Conversation | QuarantinedRow]:
    """Stream the conversations of one file in order.

    Args:
        uri: local path or `s3://` object.
        label: what ids of rows without one begin with.
        system_prompt: system turn put before conversations that have none; None adds none.

    Yields:
        A conversation, or the bad row with its `file:row` and reason.

    Raises:
        StorageError: the file is missing, cannot be read, or is a damaged compressed stream.
        DataError: it is cut short inside its list of rows, or is no readable table.
    """
    for rows in _batches(uri, label, system_prompt):
        yield from rows


def parse_batch(raw: RawBatch, *, label: str, system_prompt: str | None) -> list[Conversation | QuarantinedRow]:
    """Parse raw rows; that ids are unique is for the caller to see to (`SeenIds`), who knows all batches.

    Returns:
        In order, one value a row; blank lines give none.
    """
    found: list[Conversation | QuarantinedRow] = []
    for number, row in enumerate(raw.rows, start=raw.first_row):
        if isinstance(row, bytes) and not row.strip():
            continue
        try:
            parsed = parse_row(row, origin=f"{raw.uri}:{number}", default_id=f"{label}:{number}")
        except BadRowError as error:
            found.append(error.row)
            continue
        if parsed.text is None and system_prompt is not None:
            parsed = replace(parsed, messages=with_system_prompt(parsed.messages, system_prompt))
        found.append(parsed)
    return found


def parse_row(row: RawRow, *, origin: str, default_id: str) -> Conversation:
    """Parse one raw row.

    Raises:
        BadRowError: it is no usable conversation; names the origin and the offending value.
    """
    if isinstance(row, OversizedRow):
        detail = f"the row has {row.size_bytes} bytes or more, the limit is {MAX_ROW_BYTES}"
        raise BadRowError("row_too_large", detail, origin=origin)
    value = without_nulls(row) if isinstance(row, dict) else _decoded(row, origin)
    if not isinstance(value, dict):
        raise BadRowError("wrong_type", f"the row holds {type(value).__name__}, not an object", origin=origin)
    return conversation_of(value, origin=origin, default_id=default_id)


def read_conversations(
    files: Sequence[str], *, limit: int | None, system_prompt: str | None
) -> Iterator[Conversation | QuarantinedRow]:
    """Stream the conversations of many files in order.

    Args:
        files: local paths, `s3://` objects, or patterns of either; a file that is named twice is read once.
        limit: conversations to take (bad rows not counted); all if None.
        system_prompt: system turn put before conversations that have none; None adds none.

    Yields:
        A conversation, or the bad row with its `file:row` and reason. An id that an earlier file has used too has its file's
        label in front of it (`b.jsonl/17`).

    Raises:
        StorageError: a file is missing or cannot be read, or a pattern matches nothing.
        DataError: a file is cut short inside its list of rows, or is no readable table.
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


def source_labels(files: Sequence[str]) -> list[str]:
    """What a data set calls its files: their names without folders; the second file of one name has `~2` behind it.

    A label depends on no file that comes later, so files can be added behind the others.
    """
    labels: dict[str, None] = {}
    for name in (PurePosixPath(uri).name for uri in files):
        forms = chain([name], (f"{name}~{number}" for number in count(2)))
        labels[next(form for form in forms if form not in labels)] = None
    return list(labels)


def synthetic_conversations(*, seed: int, count: int, split: Split, system_prompt: str | None) -> Iterator[Conversation]:
    """Stream the synthetic generator's conversations as records, answers of the generator included."""
    for chat in generate_conversations(seed=seed, count=count, split=split):
        messages = tuple(Message(role=ROLES[role], content=content) for role, content in chat.messages)
        yield Conversation(
            id=chat.id,
            messages=with_system_prompt(messages, system_prompt),
            origin=f"synthetic:{chat.id}",
            kind=chat.kind,
        )


def configured_conversations(data: DataConfig) -> Iterator[Conversation | QuarantinedRow]:
    """Stream the training conversations that a configuration names.

    Raises:
        StorageError: a file is missing or cannot be read.
        DataError: a synthetic source without a number of conversations, or a file that cannot be used.
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


def _rows(files: Sequence[str], system_prompt: str | None) -> Iterator[Conversation | QuarantinedRow]:
    uris = list(dict.fromkeys(uri for pattern in files for uri in expand(pattern)))
    seen = SeenIds()
    for uri, label in zip(uris, source_labels(uris), strict=True):
        for rows in _batches(uri, label, system_prompt):
            yield from seen.checked(_renamed(rows, seen, label) if len(uris) > 1 else rows)


def _batches(uri: str, label: str, system_prompt: str | None) -> Iterator[list[Conversation | QuarantinedRow]]:
    """One file's rows; a conversation whose id was used before in it is a bad row."""
    seen = SeenIds()
    for raw in read_raw_batches(uri, rows_per_batch=READ_ROWS):
        yield list(seen.checked(parse_batch(raw, label=label, system_prompt=system_prompt)))


def _renamed(rows: Iterable[Conversation | QuarantinedRow], seen: SeenIds, label: str) -> list[Conversation | QuarantinedRow]:
    """Rows of one file; ids that earlier files have used are qualified."""
    found = list(rows)
    used = iter(seen.met(id_digests([row.id for row in found if isinstance(row, Conversation)])).tolist())
    return [replace(row, id=f"{label}/{row.id}") if isinstance(row, Conversation) and next(used) else row for row in found]


def _decoded(row: bytes, origin: str) -> Any:
    try:
        return _decode(row)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # the slower decoder below takes a little more (NaN) and says better what is wrong
    try:
        text = row.decode("utf-8")
    except UnicodeDecodeError as error:
        detail = f"byte {row[error.start]:#04x} at offset {error.start} of the row is not UTF-8"
        raise BadRowError("not_utf8", detail, origin=origin) from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRowError("not_json", f"{error}", origin=origin) from error
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRowError("wrong_type", "the row holds half a surrogate pair: no valid text", origin=origin) from error
    return value
