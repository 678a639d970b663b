"""One door to bytes named by a URI: a local path, `file://`, or `s3://bucket/key`.

Invariant: bytes are handed out as they lie there (`compression` unpacks), and a missing name is a `StorageError` that names it.
The S3 endpoint is the environment's AWS_ENDPOINT_URL, so that any S3-compatible store can stand in.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from dflash.errors import StorageError
from dflash.storage.local import HASH_CHUNK_BYTES, atomic_write_bytes, create_exclusively
from dflash.storage.names import bucket_and_key, is_s3, local_path
from dflash.storage.s3_read import object_chunks, open_object
from dflash.storage.s3_write import put_object_file


def get_bytes(uri: str | Path) -> bytes:
    """Whole content of a file or object.

    Raises:
        StorageError: it does not exist or cannot be read.
    """
    return b"".join(read_chunks(uri))


def put_file(local: Path, uri: str | Path, *, only_if_absent: bool) -> bool:
    """Copy a local file to `uri`, atomically.

    Args:
        local: file to copy.
        uri: destination; the folder of a local one must exist.
        only_if_absent: leave an existing destination alone (on S3: `If-None-Match: *`).

    Returns:
        Whether the destination was written by this call.

    Raises:
        StorageError: the source or the destination cannot be used.
    """
    destination = str(uri)
    if is_s3(destination):
        return put_object_file(*bucket_and_key(destination), local, only_if_absent=only_if_absent)
    target = local_path(destination)
    data = get_bytes(local)
    if only_if_absent:
        return create_exclusively(target, data)
    atomic_write_bytes(target, data)
    return True


def read_chunks(uri: str | Path) -> Iterator[bytes]:
    """Content of a file or object as a stream of chunks.

    Raises:
        StorageError: it does not exist or cannot be read.
    """
    name = str(uri)
    if is_s3(name):
        yield from object_chunks(*bucket_and_key(name), start=0, length=None, tag=None)
        return
    try:
        with local_path(name).open("rb") as file:
            while chunk := file.read(HASH_CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise _unreadable(name, error) from error


def open_binary(uri: str | Path) -> BinaryIO:
    """A file or object as a seekable file (an object by ranged reads with read-ahead).

    Raises:
        StorageError: it does not exist or cannot be read.
    """
    name = str(uri)
    if is_s3(name):
        return open_object(*bucket_and_key(name))
    try:
        return local_path(name).open("rb")
    except OSError as error:
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: OSError) -> StorageError:
    remedy = "check the path and its permissions"
    if isinstance(error, IsADirectoryError):
        remedy = f"name a file, or where patterns are taken the files in it: {name.rstrip('/')}/*"
    return StorageError(f"cannot read {name}: {error.strerror}", remedy=remedy)
