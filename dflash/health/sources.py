"""Where a log's bytes come from: one question, asked again and again, that any store of bytes can answer.

Invariant: a source is asked for bytes at an offset together with the few before it, in one go, so that the reader can
tell from one answer whether the past is still what it was. Files are read here; other kinds are handed in.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from dflash.errors import DataError


class Piece(NamedTuple):
    """Part of a log.

    Attributes:
        identity: changes when another file takes the name (an inode); 0 where there is no such thing.
        tail: the bytes right before the offset, as many as were asked for; fewer if the log ends before the offset.
        data: the bytes from the offset on.
    """

    identity: int
    tail: bytes
    data: bytes


class LogSource(Protocol):
    """Bytes under a name."""

    @property
    def name(self) -> str:
        """What errors call it."""

    def read_at(self, offset: int, *, before: int, max_bytes: int) -> Piece | None:
        """The `before` bytes ahead of `offset` and up to `max_bytes` behind it; None if there is no such log.

        Raises:
            DflashError: it cannot be read.
        """


class LocalLog:
    """A file on this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def name(self) -> str:
        """The path."""
        return str(self._path)

    def read_at(self, offset: int, *, before: int, max_bytes: int) -> Piece | None:
        """See `LogSource`.

        Raises:
            DataError: it is not a regular file, or may not be read.
        """
        try:
            with _opened(self._path) as log:
                identity = os.fstat(log.fileno()).st_ino
                log.seek(offset - before)
                tail = log.read(before)
                data = log.read(max_bytes) if len(tail) == before else b""
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(
                f"the log {self._path} cannot be read: {error.strerror}", remedy="give the path of a readable train_log.jsonl"
            ) from error
        return Piece(identity, tail, data)


def _opened(path: Path) -> BinaryIO:
    """A regular file; anything else is refused before it is read, because a pipe or a device may never end or never begin."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        is_folder = stat.S_ISDIR(mode)
        raise OSError(errno.EISDIR if is_folder else errno.EINVAL, os.strerror(errno.EISDIR) if is_folder else "not a file")
    return os.fdopen(descriptor, "rb")


def blocks_of(source: LogSource, *, block_bytes: int) -> Iterator[bytes]:
    """A log from its beginning to its present end, in blocks; nothing if it does not exist."""
    offset = 0
    while (piece := source.read_at(offset, before=0, max_bytes=block_bytes)) is not None and piece.data:
        yield piece.data
        offset += len(piece.data)
