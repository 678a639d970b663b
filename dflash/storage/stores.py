"""A store: one folder, on a local disk or below `s3://bucket/prefix`, with the same promises on both.

Invariant: an object appears whole or not at all, and of any number of writers with `only_if_absent` exactly one gets True.
That conditional put is the only commit primitive that data sets and mirrored runs rely on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from dflash.storage.local import HASH_CHUNK_BYTES
from dflash.storage.local_store import LocalStore
from dflash.storage.names import is_s3, local_path
from dflash.storage.s3_store import S3Store


class Store(Protocol):
    """A folder of objects; names are relative, `/`-separated and never leave it.

    Every method raises `StorageError` for a name that leaves the store and for a store that cannot be used.
    """

    @property
    def uri(self) -> str:
        """Absolute path or `s3://bucket/prefix`."""

    @property
    def local_root(self) -> Path | None:
        """The folder itself if it is local (for memory maps), else None."""

    def read(self, name: str) -> bytes:
        """Whole content; an absent object is a StorageError."""

    def read_range(self, name: str, *, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start`; fewer is a StorageError."""

    def size(self, name: str) -> int | None:
        """Bytes of an object; None if it is absent."""

    def put(self, name: str, data: bytes, *, only_if_absent: bool) -> bool:
        """Write an object durably and atomically; False if it existed and `only_if_absent`."""

    def put_file(self, name: str, local: Path, *, only_if_absent: bool) -> bool:
        """Like `put`, from a local file that is streamed (locally linked: it must not be changed afterwards)."""

    def names(self, prefix: str) -> Iterator[str]:
        """Names that start with `prefix`, recursively, sorted by code point."""

    def open(self, name: str) -> BinaryIO:
        """A seekable file to read from."""

    def delete(self, name: str) -> None:
        """Remove an object; an absent one is fine."""


def open_store(uri: str | Path) -> Store:
    """The store at a local path, `file://` or `s3://bucket/prefix`; nothing is created or asked yet.

    Raises:
        StorageError: the address has an unknown scheme or lacks a bucket.
    """
    address = str(uri)
    return S3Store(address) if is_s3(address) else LocalStore(local_path(address))


def sha256_in_store(store: Store, name: str) -> str:
    """SHA-256 (hex) of an object's content, streamed.

    Raises:
        StorageError: it is absent or cannot be read.
    """
    digest = hashlib.sha256()
    with store.open(name) as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
