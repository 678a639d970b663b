"""The one door to files and `s3://` objects: durable, atomic, verified."""

from dflash.storage.local import (
    alone,
    append_line,
    atomic_write_bytes,
    atomic_write_text,
    create_exclusively,
    disk_errors,
    fsync_dir,
    sha256_file,
)
from dflash.storage.local_store import LocalStore
from dflash.storage.s3_store import S3Store
from dflash.storage.ssh import RemoteFile, is_ssh, remote_file
from dflash.storage.stores import Store, open_store, sha256_in_store
from dflash.storage.uris import get_bytes, open_binary, put_file, read_chunks

__all__ = [
    "LocalStore",
    "RemoteFile",
    "S3Store",
    "Store",
    "alone",
    "append_line",
    "atomic_write_bytes",
    "atomic_write_text",
    "create_exclusively",
    "disk_errors",
    "fsync_dir",
    "get_bytes",
    "is_ssh",
    "open_binary",
    "open_store",
    "put_file",
    "read_chunks",
    "remote_file",
    "sha256_file",
    "sha256_in_store",
]
