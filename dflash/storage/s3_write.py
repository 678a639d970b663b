"""Writing S3 objects: whole or not at all, and conditionally where asked.

Invariant: an object becomes visible by one request (the put, or the completion of a multipart upload), and an upload that
fails is aborted, so it leaves nothing visible and nothing that is paid for.
Hard decision: every object carries its writer's random token as metadata. If an answer is lost, the client's own retry meets
the object that it just wrote; the token tells this from another writer's object, so that exactly one writer is told True.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dflash.errors import StorageError
from dflash.storage.s3_client import pause_after, s3_client, s3_errors, status_of, storage_error

logger = logging.getLogger(__name__)

MULTIPART_FROM_BYTES = 32 * 2**20
PART_BYTES = 16 * 2**20
"""Parts are at least this long (S3's minimum is 5 MiB); longer for objects beyond MAX_PARTS of them."""

MAX_PARTS = 10_000
PARTS_AT_ONCE = 4
"""Parts in flight; with their buffers they cost at most PARTS_AT_ONCE x PART_BYTES of memory for objects up to 160 GB."""

_TOKEN_KEY = "dflash-writer"  # noqa: S105 - a name
_CONFLICT_TRIES = 6


def put_object(bucket: str, key: str, data: bytes, *, only_if_absent: bool) -> bool:
    """Write an object in one request.

    Returns:
        False if it existed and `only_if_absent`.

    Raises:
        StorageError: it cannot be written.
    """

    def put(arguments: dict[str, Any], condition: dict[str, str]) -> None:
        s3_client().put_object(**arguments, **condition, Body=data)

    return _commit(put, bucket, key, only_if_absent=only_if_absent)


def put_object_file(bucket: str, key: str, local: Path, *, only_if_absent: bool) -> bool:
    """Write an object from a local file; a large one in parts.

    Returns:
        False if it existed and `only_if_absent`.

    Raises:
        StorageError: the file cannot be read or the object cannot be written.
    """
    try:
        size = local.stat().st_size
        if size < MULTIPART_FROM_BYTES:
            return put_object(bucket, key, local.read_bytes(), only_if_absent=only_if_absent)
    except OSError as error:
        raise StorageError(f"cannot read {local}: {error.strerror}", remedy="check the path and its permissions") from error

    def put(arguments: dict[str, Any], condition: dict[str, str]) -> None:
        _multipart(arguments, condition, local, size)

    return _commit(put, bucket, key, only_if_absent=only_if_absent)


def remove_object(bucket: str, key: str) -> None:
    """Remove an object; an absent one is fine.

    Raises:
        StorageError: it cannot be removed.
    """
    try:
        s3_client().delete_object(Bucket=bucket, Key=key)
    except s3_errors() as error:
        if status_of(error) != 404:
            raise storage_error("remove", f"s3://{bucket}/{key}", error) from error


def _commit(put: Callable[[dict[str, Any], dict[str, str]], None], bucket: str, key: str, *, only_if_absent: bool) -> bool:
    """Run a put; whether it wrote the object is settled even when answers are lost."""
    token = uuid.uuid4().hex
    arguments: dict[str, Any] = {"Bucket": bucket, "Key": key, "Metadata": {_TOKEN_KEY: token}}
    condition = {"IfNoneMatch": "*"} if only_if_absent else {}
    for attempt in range(1, _CONFLICT_TRIES + 1):
        try:
            put(arguments, condition)
        except s3_errors() as error:
            if only_if_absent and status_of(error) == 412:
                return _writer_of(bucket, key) == token
            if _upload_is_gone(error) and _writer_of(bucket, key) == token:  # completed, but the answer was lost
                return True
            # 409: another conditional request on this name is in progress, or the object is being deleted.
            if only_if_absent and status_of(error) == 409 and attempt < _CONFLICT_TRIES:
                pause_after(attempt)
                continue
            raise storage_error("write", f"s3://{bucket}/{key}", error) from error
        return True
    raise AssertionError("unreachable")


def _upload_is_gone(error: Exception) -> bool:
    return bool(getattr(error, "response", {}).get("Error", {}).get("Code") == "NoSuchUpload")


def _writer_of(bucket: str, key: str) -> str | None:
    try:
        found: dict[str, str] = s3_client().head_object(Bucket=bucket, Key=key).get("Metadata", {})
    except s3_errors() as error:
        if status_of(error) == 404:  # removed since
            return None
        raise storage_error("look at", f"s3://{bucket}/{key}", error) from error
    return found.get(_TOKEN_KEY)


def _multipart(arguments: dict[str, Any], condition: dict[str, str], local: Path, size: int) -> None:
    """One upload in parts: completed under the condition, or aborted."""
    client = s3_client()
    upload = {name: arguments[name] for name in ("Bucket", "Key")}
    upload["UploadId"] = client.create_multipart_upload(**arguments)["UploadId"]
    try:
        parts = _upload_parts(client, upload, local, size)
        client.complete_multipart_upload(**upload, **condition, MultipartUpload={"Parts": parts})
    except BaseException:
        _abort(client, upload)
        raise


def _upload_parts(client: Any, upload: dict[str, Any], local: Path, size: int) -> list[dict[str, Any]]:
    part_bytes = max(PART_BYTES, -(-size // MAX_PARTS))
    failed = threading.Event()

    def send(number: int) -> dict[str, Any]:
        if failed.is_set():
            raise StorageError(f"the upload of {local} was given up", remedy="see the first error")
        try:
            with local.open("rb") as file:
                file.seek((number - 1) * part_bytes)
                data = file.read(part_bytes)
            if len(data) != min(part_bytes, size - (number - 1) * part_bytes):
                raise StorageError(f"{local} changed while it was uploaded", remedy="write files completely before they are put")
            answer = client.upload_part(**upload, PartNumber=number, Body=data)
        except BaseException:
            failed.set()
            raise
        return {"PartNumber": number, "ETag": answer["ETag"]}

    with ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="s3-part") as pool:
        futures = [pool.submit(send, number) for number in range(1, -(-size // part_bytes) + 1)]
        try:
            return [future.result() for future in futures]
        except BaseException:
            failed.set()
            pool.shutdown(cancel_futures=True)
            raise


def _abort(client: Any, upload: dict[str, Any]) -> None:
    """Best effort: the first error is the one to report, and a bucket's life-cycle rule catches what a dead network leaves."""
    try:
        client.abort_multipart_upload(**upload)
    except s3_errors():
        logger.warning("the upload of s3://%s/%s could not be aborted", upload["Bucket"], upload["Key"])
