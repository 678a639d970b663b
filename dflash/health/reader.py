"""Incremental reading of a growing log: only new whole lines, and a cursor that notices when the past has changed.

Invariant: reading a log in any number of pieces yields the same items as reading it at once; a byte is read a second
time only if it belongs to a line that was still unfinished or longer than a usual reading, or to the 4 KiB before the cursor.

The hard decision: the identity of a log is its content, not its inode. The hash of the last 4 KiB before the cursor
tells an appended file from a rewritten one even where inodes are reused, and lets a copied log be continued.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from dflash.health.heap import uncollected
from dflash.health.lines import LogItem, LogReplaced, TornLine, decode_block
from dflash.health.sources import LocalLog, LogSource, Piece

TAIL_BYTES = 4096


class LogCursor(msgspec.Struct, frozen=True):
    """How far a log has been read.

    Attributes:
        inode: of the file that was read last.
        offset: bytes consumed, always just behind a newline unless `skipping`.
        tail_sha256: hash of the last 4 KiB (or fewer) before `offset`.
        skipping: the cursor stands inside a line too long to hold.
    """

    inode: int
    offset: int
    tail_sha256: str
    skipping: bool


class ReadResult(msgspec.Struct, frozen=True):
    """What one reading gave.

    Attributes:
        bytes_read: bytes that were read from the file, the 4 KiB before the cursor included.
        pending_bytes: bytes behind the last newline, left for the next reading.
        more: the block was full; read again at once.
    """

    items: tuple[LogItem, ...]
    cursor: LogCursor
    bytes_read: int
    pending_bytes: int
    more: bool


def start_cursor() -> LogCursor:
    """The cursor before a first reading."""
    return LogCursor(inode=0, offset=0, tail_sha256="", skipping=False)


def read_new(path: Path, cursor: LogCursor, *, max_bytes: int, max_line_bytes: int | None = None) -> ReadResult:
    """Read the whole lines of a local log behind `cursor`.

    Args:
        path: the log; a file that does not exist yet reads as empty.
        cursor: where the previous reading ended.
        max_bytes: bytes of one reading.
        max_line_bytes: of a single line, `max_bytes` if None; a longer one is reported and skipped.

    Returns:
        The new items and the cursor behind them.

    Raises:
        DataError: `path` is not a regular file, or may not be read.
        SchemaVersionError: a line was written with another schema version.
    """
    source = LocalLog(path)
    result = read_new_from(source, cursor, max_bytes=max_bytes)
    if max_line_bytes is not None and result.cursor.skipping and not cursor.skipping:
        return read_new_from(source, cursor, max_bytes=max_line_bytes)  # one line is longer than a usual reading
    return result


def read_new_from(source: LogSource, cursor: LogCursor, *, max_bytes: int) -> ReadResult:
    """Read the whole lines of any source behind `cursor`; see `read_new`."""
    piece = source.read_at(cursor.offset, before=min(cursor.offset, TAIL_BYTES), max_bytes=max_bytes)
    if piece is None:
        return _gone(cursor)
    items: list[LogItem] = []
    bytes_read = len(piece.tail) + len(piece.data)
    reason = _replaced(cursor, piece)
    if reason is not None:
        items.append(LogReplaced(reason=reason))
        cursor = start_cursor()
        piece = source.read_at(0, before=0, max_bytes=max_bytes)
        if piece is None:
            return _gone(cursor)
        bytes_read += len(piece.data)
    data = piece.data
    full = len(data) == max_bytes
    end = data.rfind(b"\n") + 1
    skipping = cursor.skipping
    start = data.find(b"\n") + 1 if skipping else 0
    if end == 0 and full:
        if not skipping:
            items.append(TornLine(offset=cursor.offset, length_bytes=max_bytes, reason=f"a line of over {max_bytes} bytes"))
        end, skipping = len(data), True
    elif end:
        with uncollected():
            items += decode_block(data[start:end], offset=cursor.offset + start, origin=source.name)
        skipping = False
    consumed = data[end - TAIL_BYTES : end] if end >= TAIL_BYTES else (piece.tail + data[:end])[-TAIL_BYTES:]
    after = LogCursor(
        inode=piece.identity, offset=cursor.offset + end, tail_sha256=hashlib.sha256(consumed).hexdigest(), skipping=skipping
    )
    return ReadResult(items=tuple(items), cursor=after, bytes_read=bytes_read, pending_bytes=len(data) - end, more=full)


def is_at_end(path: Path, cursor: LogCursor) -> bool:
    """Whether a local log is as it was and has nothing behind `cursor`, not even the beginning of a line."""
    if cursor.skipping:
        return False
    piece = LocalLog(path).read_at(cursor.offset, before=min(cursor.offset, TAIL_BYTES), max_bytes=1)
    return piece is not None and not piece.data and _replaced(cursor, piece) is None and piece.identity == cursor.inode


def _gone(cursor: LogCursor) -> ReadResult:
    gone = (LogReplaced(reason="removed"),) if cursor.offset else ()
    return ReadResult(items=gone, cursor=start_cursor(), bytes_read=0, pending_bytes=0, more=False)


def _replaced(cursor: LogCursor, piece: Piece) -> str | None:
    if len(piece.tail) < min(cursor.offset, TAIL_BYTES):
        return "truncated"
    if cursor.offset and hashlib.sha256(piece.tail).hexdigest() != cursor.tail_sha256:
        return "rewritten" if piece.identity == cursor.inode else "replaced by another file"
    return None
