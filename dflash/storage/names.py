"""Names of objects inside a store, and the parts of an `s3://` address.

Invariant: a name is relative, `/`-separated and stays below its store: no `..`, no empty part, nothing absolute, so a
manifest that was tampered with cannot make a reader or a builder touch anything outside the data set's folder.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from dflash.errors import StorageError

S3_SCHEME = "s3"


def check_name(name: str, *, uri: str) -> str:
    """The name itself, if it may be used inside the store `uri`.

    Raises:
        StorageError: it is empty, absolute, or leaves the store.
    """
    parts = name.split("/")
    if "" in parts or "." in parts or ".." in parts or "\\" in name or not name.isprintable():
        raise StorageError(
            f"{name!r} is no name inside {uri}", remedy="names are relative, separated by single slashes, without . and .."
        )
    return name


def is_s3(uri: str) -> bool:
    """Whether the address names an S3 object or folder."""
    return urlsplit(uri).scheme == S3_SCHEME


def bucket_and_prefix(uri: str) -> tuple[str, str]:
    """Bucket and key prefix (without a slash at either end) of `s3://bucket/prefix`.

    Raises:
        StorageError: no bucket is named.
    """
    bucket, _, prefix = uri.partition("://")[2].partition("/")
    if not bucket:
        raise StorageError(f"{uri} lacks a bucket", remedy="write s3://bucket/prefix")
    return bucket, prefix.strip("/")


def bucket_and_key(uri: str) -> tuple[str, str]:
    """Bucket and key of `s3://bucket/key`.

    Raises:
        StorageError: one of them is missing.
    """
    bucket, _, key = uri.partition("://")[2].partition("/")
    if not bucket or not key:
        raise StorageError(f"{uri} lacks a bucket or a key", remedy="write s3://bucket/key")
    return bucket, key


def local_path(uri: str) -> Path:
    """The path that a local address (a path or `file://`) names.

    Raises:
        StorageError: the address has a scheme that is not known.
    """
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(parts.path)
    if "://" in uri:
        raise StorageError(f"{uri} has the unknown scheme {parts.scheme!r}", remedy="use a local path, file:// or s3://")
    return Path(uri)
