"""A store below `s3://bucket/prefix`; any S3-compatible service will do.

Invariant: see `s3_read` (exact lengths, continued after breaks) and `s3_write` (whole or absent, exactly one conditional writer).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from dflash.storage.names import bucket_and_prefix, check_name
from dflash.storage.s3_client import s3_client, s3_errors, storage_error
from dflash.storage.s3_read import object_size, open_object, read_object, read_object_range
from dflash.storage.s3_write import put_object, put_object_file, remove_object

LISTED_AT_ONCE = 1000
"""Names of one page of a listing; S3 gives no more."""


class S3Store:
    """Objects below a prefix of a bucket."""

    def __init__(self, uri: str) -> None:
        self._bucket, prefix = bucket_and_prefix(uri)
        self._prefix = f"{prefix}/" if prefix else ""

    @property
    def uri(self) -> str:
        """`s3://bucket/prefix`."""
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def local_root(self) -> None:
        """There is no local folder."""
        return

    def read(self, name: str) -> bytes:
        """Whole content."""
        return read_object(self._bucket, self._key(name))

    def read_range(self, name: str, *, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start`."""
        return read_object_range(self._bucket, self._key(name), start=start, length=length, tag=None)

    def size(self, name: str) -> int | None:
        """Bytes of an object; None if it is absent."""
        return object_size(self._bucket, self._key(name))

    def put(self, name: str, data: bytes, *, only_if_absent: bool) -> bool:
        """Write an object in one request."""
        return put_object(self._bucket, self._key(name), data, only_if_absent=only_if_absent)

    def put_file(self, name: str, local: Path, *, only_if_absent: bool) -> bool:
        """Write an object from a local file, in parts if it is large."""
        return put_object_file(self._bucket, self._key(name), local, only_if_absent=only_if_absent)

    def names(self, prefix: str) -> Iterator[str]:
        """Names that start with `prefix`, sorted by code point (S3 lists them so), page by page."""
        if prefix:
            check_name(prefix.removesuffix("/"), uri=self.uri)
        try:
            pages = (
                s3_client()
                .get_paginator("list_objects_v2")
                .paginate(Bucket=self._bucket, Prefix=self._prefix + prefix, PaginationConfig={"PageSize": LISTED_AT_ONCE})
            )
            for page in pages:
                for entry in page.get("Contents", ()):
                    yield entry["Key"][len(self._prefix) :]
        except s3_errors() as error:
            raise storage_error("list", f"{self.uri}/{prefix}", error) from error

    def open(self, name: str) -> BinaryIO:
        """A seekable file over ranged reads."""
        return open_object(self._bucket, self._key(name))

    def delete(self, name: str) -> None:
        """Remove an object; an absent one is fine."""
        remove_object(self._bucket, self._key(name))

    def _key(self, name: str) -> str:
        return self._prefix + check_name(name, uri=self.uri)
