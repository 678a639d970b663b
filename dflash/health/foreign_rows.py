"""Rows out of somebody else's log: one flat object a record, whatever the format. Bytes in, rows out; no file.

Invariant: lines are streamed, so that memory is bounded by the longest line that is accepted; a document that is one JSON
value has to be held whole and may therefore not be larger than `LARGEST_DOCUMENT_BYTES`.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import msgspec

from dflash.errors import DataError
from dflash.health.foreign_documents import document_rows, history_rows, is_history_entry
from dflash.health.foreign_values import Row, Rows, flattened

Format = Literal["own", "json lines", "table", "document", "empty"]
HEAD_BYTES = 256 * 1024
LARGEST_DOCUMENT_BYTES = 32 * 2**20
LONGEST_LINE_BYTES = 4 * 2**20
_TEXT_CONTROLS = frozenset(range(32)) - {9, 10, 12, 13, 27}
_DELIMITERS = ",\t;"
_BOM = b"\xef\xbb\xbf"


def sniff(head: bytes, *, origin: str) -> Format:
    """Which kind of log begins with these bytes.

    Args:
        head: up to `HEAD_BYTES` from the beginning.
        origin: name of the log, for errors.

    Raises:
        DataError: it is not text.
    """
    text = head.removeprefix(_BOM).lstrip()
    if not text:
        return "empty"
    if _is_binary(head):
        raise DataError(f"{origin} is not a text file", remedy="give a log: JSON lines, CSV, trainer_state.json or a golden file")
    if text[:1] == b"[":
        return "document"
    if text[:1] != b"{":
        return "table"
    line, _, rest = text.partition(b"\n")
    value = _line_value(line)
    if value is None:
        # A first line torn by a kill is followed by whole ones; a printed document has no whole object on its second line.
        value = _line_value(rest.partition(b"\n")[0])
        if value is None:
            return "document"
    if value.get("kind") in ("step", "event") and "schema_version" in value:
        return "own"
    holds_lists = any(isinstance(item, dict | list) for item in value.values())
    return "document" if holds_lists and not rest.strip() else "json lines"


def _is_binary(head: bytes) -> bool:
    if b"\x00" in head or any(byte in _TEXT_CONTROLS for byte in head[:4096]):
        return True
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start < len(head) - 4  # a character may be cut at the end
    return False


def read_rows(blocks: Iterable[bytes], *, kind: Format, rows: Rows, origin: str) -> Iterator[Row]:
    """The records of a log of somebody else.

    Args:
        blocks: its bytes from the beginning.
        kind: what `sniff` said.
        rows: filled on the way.
        origin: name of the log, for errors.

    Raises:
        DataError: it is no log of any known form, or too large a document.
    """
    if kind == "document":
        yield from document_rows(_whole(blocks, origin=origin), rows=rows, origin=origin)
    elif kind == "table":
        yield from _table_rows(blocks, rows=rows, origin=origin)
    elif kind != "empty":
        yield from _line_rows(blocks, rows=rows)


def _line_rows(blocks: Iterable[bytes], *, rows: Rows) -> Iterator[Row]:
    rows.format = "JSON lines"
    history: list[Mapping[str, Any]] = []
    for line in _lines(blocks, rows=rows):
        value = _line_value(line)
        if value is None:
            rows.unreadable += 1
        elif is_history_entry(value):
            history.append(value)
        else:
            yield flattened(value)
    if history:
        rows.format = "metric history (one value a line)"
        yield from history_rows(history)


def _table_rows(blocks: Iterable[bytes], *, rows: Rows, origin: str) -> Iterator[Row]:
    names: list[str] | None = None
    delimiter = ","
    for line in _lines(blocks, rows=rows):
        text = line.decode("utf-8", errors="replace")
        if names is None:
            delimiter = max(_DELIMITERS, key=text.count)
            names = [name.strip() for name in _cells(text, delimiter)]
            if text.count(delimiter) == 0 or not any(any(c.isalpha() for c in name) for name in names):
                raise DataError(
                    f"{origin} is no log of a known form: it begins with {text[:60]!r}",
                    remedy="give JSON lines, a table with a line of names, trainer_state.json, or a golden file",
                )
            rows.format = "table (CSV)"
            continue
        cells = _cells(text, delimiter)
        if len(cells) == len(names):
            yield dict(zip(names, cells, strict=True))
        else:
            rows.unreadable += 1
    if names is None and rows.unreadable:
        raise DataError(
            f"{origin} is no log of a known form: its first line is over {LONGEST_LINE_BYTES >> 20} MiB",
            remedy="give JSON lines, a table with a line of names, trainer_state.json, or a golden file",
        )


def _cells(text: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader(io.StringIO(text), delimiter=delimiter), [])
    except csv.Error:
        return []


def _lines(blocks: Iterable[bytes], *, rows: Rows) -> Iterator[bytes]:
    """Lines that are not empty; of one too long to hold only that it was there is kept."""
    rest, skipping, first = b"", False, True
    for block in blocks:
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            stripped = line.removeprefix(_BOM).strip() if first else line.strip()
            first = False
            if len(stripped) > LONGEST_LINE_BYTES:
                rows.unreadable += not skipping
            elif stripped and not skipping:
                yield stripped
            skipping = False
        if len(rest) > LONGEST_LINE_BYTES:
            rows.unreadable += not skipping
            rest, skipping = b"", True
    if rest.strip() and not skipping:
        yield rest.strip()


def _line_value(line: bytes) -> dict[str, Any] | None:
    """The object on a line, bare NaN and Infinity tokens allowed; None if it is none."""
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        try:
            value = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def _whole(blocks: Iterable[bytes], *, origin: str) -> bytes:
    held = bytearray()
    for block in blocks:
        held += block
        if len(held) > LARGEST_DOCUMENT_BYTES:
            raise DataError(
                f"{origin} is one JSON value of over {LARGEST_DOCUMENT_BYTES >> 20} MiB",
                remedy="write one record a line, so that it can be read as a stream",
            )
    return bytes(held)
