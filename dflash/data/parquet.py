"""Parquet with a schema version in its metadata: another version or another schema is refused by name.

Pages carry checksums, which readers verify: a flipped byte is an error, never a wrong token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dflash.errors import DataError, SchemaVersionError

VERSION_KEY = b"dflash_schema_version"


def versioned_schema(schema: pa.Schema, version: int) -> pa.Schema:
    """The schema with its version in the metadata."""
    return schema.with_metadata({VERSION_KEY: str(version).encode()})


def open_parquet(path: Path, schema: pa.Schema, *, version: int) -> pq.ParquetFile:
    """Open a memory-mapped Parquet file after checking its version and schema.

    Raises:
        SchemaVersionError: written with another schema version, or with none.
        DataError: missing, unreadable, or of another schema.
    """
    with readable(path):
        file = pq.ParquetFile(path, memory_map=True, page_checksum_verification=True)
        found_schema = file.schema_arrow
        names = found_schema.names
    found = (found_schema.metadata or {}).get(VERSION_KEY, b"none").decode(errors="replace")
    if found != str(version):
        file.close()
        raise SchemaVersionError(
            f"{path} has schema version {found}, this code reads {version}",
            remedy="build it again with this version of the code, or use the version that wrote it",
        )
    if not found_schema.equals(schema):
        file.close()
        raise DataError(f"{path} has the columns {names}, not {schema.names} of the right types", remedy="build it again")
    return file


def read_columns(file: pq.ParquetFile, path: Path, *, columns: list[str], group: int | None) -> list[pa.Array]:
    """Columns of one row group (of the whole file if None), each as one array without nulls.

    Raises:
        DataError: the bytes are damaged.
    """
    with readable(path):
        table = file.read(columns=columns) if group is None else file.read_row_group(group, columns=columns)
        arrays = [table[name].combine_chunks() for name in columns]
        flat = [array.flatten() for array in arrays if isinstance(array, pa.ListArray)]
    if any(array.null_count for array in (*arrays, *flat)):
        raise _unreadable(path, "a value is null where none can be")
    return arrays


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what pyarrow raises on a missing or damaged file into a `DataError` that names it."""
    try:
        yield
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise _unreadable(path, str(error)) from error


def _unreadable(path: Path, why: str) -> DataError:
    return DataError(f"{path} cannot be read: {why}", remedy="restore the file or build it again")
