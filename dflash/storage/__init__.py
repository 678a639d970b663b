"""The one door to files and `s3://` objects: durable, atomic, verified."""

from dflash.storage.local import atomic_write_bytes, atomic_write_text, create_exclusively, fsync_dir, sha256_file
from dflash.storage.uris import get_bytes, put_file, read_lines

__all__ = [
    "atomic_write_bytes",
    "atomic_write_text",
    "create_exclusively",
    "fsync_dir",
    "get_bytes",
    "put_file",
    "read_lines",
    "sha256_file",
]
