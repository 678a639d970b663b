"""Compressed sources as streams of plain bytes, and patterns as lists of names.

Invariant: a stream that is cut short or damaged is an error that names it, never a shorter file.
What a file is compressed with is told by its first bytes: suffixes lie, and a server may hand out `.gz` files unpacked.
"""

from __future__ import annotations

import glob
import io
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import pyarrow as pa

from dflash.errors import StorageError
from dflash.storage.local import HASH_CHUNK_BYTES
from dflash.storage.names import bucket_and_key, is_s3, local_path
from dflash.storage.stores import open_store
from dflash.storage.uris import read_chunks

_MAGIC = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"))
_WILDCARDS = re.compile(r"[*?[]")


def open_decompressed(uri: str | Path) -> Iterator[bytes]:
    """Content of a file or object, unpacked if it is gzip or zstd, as a stream of non-empty chunks.

    Raises:
        StorageError: it does not exist, cannot be read, or is a compressed stream that is cut short or damaged.
    """
    chunks = read_chunks(uri)
    head = b""
    while len(head) < 4 and (chunk := next(chunks, b"")):
        head += chunk
    codec = next((name for magic, name in _MAGIC if head.startswith(magic)), None)
    content = chain([head] if head else [], chunks)
    yield from content if codec is None else _unpacked(content, codec, str(uri))


def expand(pattern: str) -> list[str]:
    """Names that a pattern stands for, sorted; a name without wildcards stands for itself.

    Args:
        pattern: local path or `s3://bucket/key`; `*`, `?` and `[...]` match inside one path part, `**` any number of parts.

    Raises:
        StorageError: nothing matches, or it names a folder.
    """
    if pattern.endswith("/"):
        raise StorageError(f"{pattern} names a folder", remedy=f"name the files in it: {pattern}*")
    if _WILDCARDS.search(pattern) is None:
        return [pattern]
    found = _objects(pattern) if is_s3(pattern) else _files(pattern)
    if not found:
        raise StorageError(f"no file matches {pattern}", remedy="check the pattern: `*` stays inside one folder, `**` does not")
    return found


def _unpacked(content: Iterable[bytes], codec: str, name: str) -> Iterator[bytes]:
    source = pa.PythonFile(io.BufferedReader(_Chunks(content), HASH_CHUNK_BYTES), mode="r")
    try:
        with pa.CompressedInputStream(source, codec) as stream:
            while chunk := stream.read(HASH_CHUNK_BYTES):
                yield chunk
    except (OSError, EOFError) as error:
        raise StorageError(
            f"{name} is a damaged or cut-off {codec} stream: {error}",
            remedy="fetch the file again",
        ) from error


class _Chunks(io.RawIOBase):
    """An iterator of chunks as a file."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        super().__init__()
        self._chunks = iter(chunks)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._rest:
            self._rest = memoryview(next(self._chunks, b""))
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def _files(pattern: str) -> list[str]:
    plain = str(local_path(pattern))
    if Path(plain).is_file():  # a name with a bracket of its own
        return [plain]
    return sorted(name for name in glob.iglob(plain, recursive=True) if Path(name).is_file())  # noqa: PTH207 - strings as given


def _objects(pattern: str) -> list[str]:
    bucket, key = bucket_and_key(pattern)
    fixed = key[: _first_wildcard(key)]
    wanted = re.compile(_as_regex(key))
    names = open_store(f"s3://{bucket}").names(fixed)
    return [f"s3://{bucket}/{name}" for name in names if wanted.fullmatch(name)]


def _first_wildcard(key: str) -> int:
    found = _WILDCARDS.search(key)
    return len(key) if found is None else found.start()


def _as_regex(key: str) -> str:
    """The pattern as a regular expression over an object's key, with the meaning that local globs have."""
    pieces = {"**/": r"(?:[^/]+/)*", "**": r".*", "*": r"[^/]*", "?": r"[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", key)
    return "".join(
        pieces.get(part) or (part.replace("[!", "[^/", 1) if part.startswith("[") and len(part) > 1 else re.escape(part))
        for part in parts
    )
