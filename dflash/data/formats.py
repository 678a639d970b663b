"""Source files as raw rows, in batches that can be sent to another process: JSON lines, JSON lists, Parquet.

What a file is, is told by its content, unpacked first if it is gzip or zstd: `PAR1` is Parquet; `[` is a list of rows; `{` is
an object with the rows in a list under `data` or `rows`, or JSON lines, which the suffix `.jsonl` (`.ndjson`) settles.

Invariant: rows keep their order and their number (the line of JSON lines, else the place in the list or table, from 1); a
batch holds at most `rows_per_batch` rows and stops growing at BATCH_BYTES, so memory does not depend on the file's size.
Damage to one row stays with that row; damage to the file (cut short, no list, no Parquet) is an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import PurePosixPath
from typing import Any

from dflash.data.formats_json import LIST_KEYS, OversizedRow, list_offset, list_rows, text_lines
from dflash.data.formats_parquet import PARQUET_MAGIC, parquet_rows
from dflash.storage.compression import open_decompressed

RawRow = bytes | dict[str, Any] | OversizedRow
"""JSON text, a row of a table, or the size of a row too large to be held."""

BATCH_BYTES = 16 * 2**20
"""Text that a batch holds at most, but for its last row."""

_HEAD_BYTES = 2**20
_LINE_SUFFIXES = frozenset({".jsonl", ".ndjson"})
_PACKED_SUFFIXES = frozenset({".gz", ".zst", ".zstd"})


@dataclass(frozen=True, slots=True)
class RawBatch:
    """Consecutive rows of one file, not yet looked at.

    Attributes:
        uri: the file.
        first_row: number of the first one.
        rows: in order; blank lines are among them, so that numbers follow from places.
    """

    uri: str
    first_row: int
    rows: tuple[RawRow, ...]


def read_raw_batches(uri: str, *, rows_per_batch: int) -> Iterator[RawBatch]:
    """Stream the rows of one file in batches.

    Args:
        uri: local path or `s3://` object.
        rows_per_batch: most rows of a batch.

    Raises:
        StorageError: the file is missing, cannot be read, or is a damaged compressed stream.
        DataError: it is cut short inside its list of rows, or is no readable table.
    """
    batch: list[RawRow] = []
    first = 1
    size = 0
    for row in _rows(uri, rows_per_batch):
        batch.append(row)
        size += len(row) if isinstance(row, bytes) else 0
        if len(batch) >= rows_per_batch or size >= BATCH_BYTES:
            yield RawBatch(uri, first, tuple(batch))
            first += len(batch)
            batch, size = [], 0
    if batch:
        yield RawBatch(uri, first, tuple(batch))


def _rows(uri: str, rows_per_batch: int) -> Iterator[RawRow]:
    chunks = open_decompressed(uri)
    head = b""
    while len(head) < _HEAD_BYTES and (chunk := next(chunks, b"")):
        head += chunk
    if head.startswith(PARQUET_MAGIC):
        yield from parquet_rows(uri, chain([head], chunks), rows_per_read=rows_per_batch)
        return
    head = head.removeprefix(b"\xef\xbb\xbf")
    start = head.lstrip()[:1]
    content = chain([head], chunks)
    if start == b"[" and not _named_as_lines(uri):
        yield from list_rows(uri, content, start=0, alone=True)
        return
    offset = list_offset(head, LIST_KEYS) if start == b"{" and not _named_as_lines(uri) else None
    if offset is not None:
        yield from list_rows(uri, content, start=offset, alone=False)
    else:
        yield from text_lines(content)


def _named_as_lines(uri: str) -> bool:
    path = PurePosixPath(uri)
    suffix = PurePosixPath(path.stem).suffix if path.suffix in _PACKED_SUFFIXES else path.suffix
    return suffix in _LINE_SUFFIXES
