"""Reading S3 objects as ranges, so that a broken connection costs what was not received yet and nothing else.

Invariant: what is returned has exactly the length that was asked for; a body that ends early, stalls or is reset is
continued from its last byte (of the same version of the object: the entity tag must match), a bounded number of times.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import closing
from typing import Any, BinaryIO, cast

from dflash.errors import StorageError
from dflash.storage.local import HASH_CHUNK_BYTES
from dflash.storage.s3_client import pause_after, s3_client, s3_errors, status_of, storage_error

MAX_RESUMES = 5
"""Times in a row that a body may break off before it has brought SOME_PROGRESS_BYTES."""

SOME_PROGRESS_BYTES = 64 * 1024

FIRST_READ_AHEAD_BYTES = 256 * 1024
LAST_READ_AHEAD_BYTES = 8 * 2**20
"""Read-ahead of a file doubles between these while it is read in order: random access stays cheap, a scan needs few requests."""

_BUFFER_BYTES = 64 * 1024


def object_size(bucket: str, key: str) -> int | None:
    """Bytes of an object; None if it is absent.

    Raises:
        StorageError: the store cannot be asked.
    """
    found = _head(bucket, key)
    return None if found is None else int(found["ContentLength"])


def _head(bucket: str, key: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = s3_client().head_object(Bucket=bucket, Key=key)
    except s3_errors() as error:
        if status_of(error) == 404:
            return None
        raise storage_error("look at", f"s3://{bucket}/{key}", error) from error
    return found


def read_object(bucket: str, key: str) -> bytes:
    """Whole content of an object.

    Raises:
        StorageError: it is absent or cannot be read.
    """
    return b"".join(object_chunks(bucket, key, start=0, length=None, tag=None))


def read_object_range(bucket: str, key: str, *, start: int, length: int, tag: str | None) -> bytes:
    """Exactly `length` bytes from `start` (of the version of the object that has the entity tag `tag`, if one is given).

    Raises:
        StorageError: the object is absent, shorter, or cannot be read.
    """
    data = b"".join(object_chunks(bucket, key, start=start, length=length, tag=tag)) if length else b""
    if len(data) != length:
        raise StorageError(
            f"s3://{bucket}/{key} ends at byte {start + len(data)}, {start + length} are asked for", remedy="restore the object"
        )
    return data


def object_chunks(bucket: str, key: str, *, start: int, length: int | None, tag: str | None) -> Iterator[bytes]:
    """Content from `start` on (at most `length` bytes; None: all), in chunks as they arrive; `tag` as in `read_object_range`.

    Raises:
        StorageError: the object is absent, changes while it is read, or cannot be read.
    """
    uri = f"s3://{bucket}/{key}"
    position, end = start, None if length is None else start + length
    failures = 0
    while end is None or position < end:
        answer = _get(bucket, key, start=position, end=end, tag=tag)
        if answer is None:  # nothing behind the object's last byte
            return
        tag, end, began_at = answer["ETag"], position + int(answer["ContentLength"]), position
        broken: Exception | None = None
        try:
            with closing(answer["Body"]) as body:
                while position < end and (chunk := body.read(min(HASH_CHUNK_BYTES, end - position))):
                    position += len(chunk)
                    yield chunk
        except s3_errors() as error:
            broken = error
        if position < end:
            failures = 1 if position - began_at >= SOME_PROGRESS_BYTES else failures + 1
            if failures > MAX_RESUMES:
                raise storage_error("read", uri, broken or OSError(f"the answers end at byte {position} of {end}")) from broken
            pause_after(failures)


def _get(bucket: str, key: str, *, start: int, end: int | None, tag: str | None) -> Any:
    """The answer to one GET, which the client has retried itself; None if `start` is behind the object's end."""
    extra: dict[str, str] = {}
    if start or end is not None:
        extra["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
    if tag is not None:
        extra["IfMatch"] = tag
    try:
        return s3_client().get_object(Bucket=bucket, Key=key, **extra)
    except s3_errors() as error:
        if status_of(error) == 416:
            return None
        uri = f"s3://{bucket}/{key}"
        if status_of(error) == 412:
            raise StorageError(f"{uri} was replaced while it was read", remedy="read it again") from error
        raise storage_error("read", uri, error) from error


def open_object(bucket: str, key: str) -> BinaryIO:
    """An object as a buffered, seekable file.

    Raises:
        StorageError: it is absent or cannot be read.
    """
    return cast("BinaryIO", io.BufferedReader(S3File(bucket, key), _BUFFER_BYTES))


class S3File(io.RawIOBase):
    """One version of an object as a seekable file; reads ahead while it is read in order."""

    def __init__(self, bucket: str, key: str) -> None:
        found = _head(bucket, key)
        if found is None:
            raise StorageError(f"s3://{bucket}/{key} does not exist", remedy="check the bucket and the name")
        super().__init__()
        self._bucket, self._key, self._size, self._tag = bucket, key, int(found["ContentLength"]), str(found["ETag"])
        self._position = 0
        self._held_from = 0
        self._held = b""
        self._ahead_bytes = FIRST_READ_AHEAD_BYTES

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Offset of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the offset of the next byte."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"negative position {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as the held block reaches, fetching one if nothing is held."""
        view = memoryview(buffer).cast("B")
        if not len(view) or self._position >= self._size:
            return 0
        offset = self._position - self._held_from
        if not 0 <= offset < len(self._held):
            self._fetch(len(view))
            offset = 0
        piece = self._held[offset : offset + len(view)]
        view[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)

    def _fetch(self, wanted: int) -> None:
        in_order = self._position == self._held_from + len(self._held)
        self._ahead_bytes = min(2 * self._ahead_bytes, LAST_READ_AHEAD_BYTES) if in_order else FIRST_READ_AHEAD_BYTES
        length = min(max(wanted, self._ahead_bytes), self._size - self._position)
        self._held = read_object_range(self._bucket, self._key, start=self._position, length=length, tag=self._tag)
        self._held_from = self._position
