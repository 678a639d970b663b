r"""One door to bytes named by a URI: a local path, `file://`, or `s3://bucket/key`.

Invariant: text is UTF-8, lines end at `\n` alone (a carriage return or a Unicode line separator inside a JSON string
never splits a record), and a missing name is a `StorageError` that names it.
The S3 endpoint is the environment's AWS_ENDPOINT_URL, so that any S3-compatible store can stand in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dflash.errors import StorageError
from dflash.storage.local import HASH_CHUNK_BYTES, atomic_write_bytes, create_exclusively

S3_SCHEME = "s3"


def get_bytes(uri: str | Path) -> bytes:
    """Whole content of a file or object.

    Raises:
        StorageError: it does not exist or cannot be read.
    """
    return b"".join(_chunks(str(uri)))


def read_lines(uri: str | Path) -> Iterator[str]:
    r"""Lines of a UTF-8 file or object, split at `\n` only and without it, read as a stream.

    Raises:
        StorageError: it does not exist, cannot be read, or holds bytes that are not UTF-8.
    """
    name = str(uri)
    for number, line in enumerate(_split_lines(_chunks(name)), start=1):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise StorageError(
                f"{name}:{number} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start} of the line",
                remedy="convert the file to UTF-8",
            ) from error


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
    if urlsplit(destination).scheme == S3_SCHEME:
        return _put_s3(local, destination, only_if_absent=only_if_absent)
    target = _local_path(destination)
    data = get_bytes(local)
    if only_if_absent:
        return create_exclusively(target, data)
    atomic_write_bytes(target, data)
    return True


def _chunks(uri: str) -> Iterator[bytes]:
    if urlsplit(uri).scheme == S3_SCHEME:
        yield from _s3_chunks(uri)
        return
    try:
        with _local_path(uri).open("rb") as file:
            while chunk := file.read(HASH_CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise StorageError(f"cannot read {uri}: {error.strerror}", remedy="check the path and its permissions") from error


def _split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
    if rest:
        yield rest


def _local_path(uri: str) -> Path:
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(parts.path)
    if "://" in uri:
        raise StorageError(f"{uri} has the unknown scheme {parts.scheme!r}", remedy="use a local path, file:// or s3://")
    return Path(uri)


def _s3_chunks(uri: str) -> Iterator[bytes]:
    bucket, key = _bucket_and_key(uri)
    client, errors = _s3()
    try:
        body = client.get_object(Bucket=bucket, Key=key)["Body"]
        yield from body.iter_chunks(HASH_CHUNK_BYTES)
    except errors as error:
        raise StorageError(f"cannot read {uri}: {error}", remedy="check the bucket, the key and the credentials") from error


def _put_s3(local: Path, uri: str, *, only_if_absent: bool) -> bool:
    bucket, key = _bucket_and_key(uri)
    client, errors = _s3()
    extra = {"IfNoneMatch": "*"} if only_if_absent else {}
    try:
        with local.open("rb") as body:
            client.put_object(Bucket=bucket, Key=key, Body=body, **extra)
    except OSError as error:
        raise StorageError(f"cannot read {local}: {error.strerror}", remedy="check the path and its permissions") from error
    except errors as error:
        status = getattr(error, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode")
        if only_if_absent and status in (409, 412):
            return False
        raise StorageError(f"cannot write {uri}: {error}", remedy="check the bucket, the key and the credentials") from error
    return True


def _bucket_and_key(uri: str) -> tuple[str, str]:
    parts = urlsplit(uri)
    key = uri.partition("://")[2].partition("/")[2]
    if not parts.netloc or not key:
        raise StorageError(f"{uri} lacks a bucket or a key", remedy="write s3://bucket/key")
    return parts.netloc, key


def _s3() -> tuple[Any, tuple[type[Exception], ...]]:
    # Imported here: boto3 costs half a second that purely local runs should not pay.
    import boto3
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    return boto3.client("s3"), (BotoCoreError, ClientError, Boto3Error)
