"""Parquet with a schema version in its metadata: another version or another schema is refused by name.

Pages carry checksums, which readers verify: a flipped byte is an error, never a wrong token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from dflash.errors import DataError

VERSION_KEY = b"dflash_schema_version"


def versioned_schema(schema: pa.Schema, version: int) -> pa.Schema:
    """The schema with its version in the metadata."""
    return schema.with_metadata({VERSION_KEY: str(version).encode()})


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what pyarrow raises on a missing or damaged file into a `DataError` that names it."""
    try:
        yield
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}", remedy="restore the file or build it again") from error
