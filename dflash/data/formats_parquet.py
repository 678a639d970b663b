"""Rows of a Parquet file as dictionaries, read by row group and only in the columns that can hold a conversation.

Invariant: memory holds one row group's needed columns at most, whatever the file's size.
Structs give every key to every row: an absent part comes as None, which the reader takes for absent.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from dflash.errors import DataError
from dflash.storage import open_binary

PARQUET_MAGIC = b"PAR1"

SHAPE_COLUMNS = ("messages", "conversations", "prompt", "text")
"""Columns one of which a table must have."""

_COLUMNS = frozenset(
    {*SHAPE_COLUMNS, "completion", "response", "reference", "system", "tools", "functions", "id", "kind", "source"}
)


def parquet_rows(uri: str, chunks: Iterable[bytes], *, rows_per_read: int) -> Iterator[dict[str, Any]]:
    """Stream the rows of a table.

    Args:
        uri: names the file; it is read in place if its own first bytes are Parquet's.
        chunks: its unpacked content, spooled to a temporary file if the file itself is compressed.
        rows_per_read: rows decoded at once.

    Raises:
        DataError: no readable table, or none of the columns that hold conversations.
        StorageError: the file cannot be read.
    """
    with ExitStack() as stack:
        file: IO[bytes] = stack.enter_context(open_binary(uri))
        if file.read(len(PARQUET_MAGIC)) != PARQUET_MAGIC:
            file = stack.enter_context(tempfile.TemporaryFile())
            for chunk in chunks:
                file.write(chunk)
        file.seek(0)
        try:
            table = pq.ParquetFile(file)
            columns = _wanted(uri, table.schema_arrow.names)
            for batch in table.iter_batches(batch_size=rows_per_read, columns=columns, use_threads=False):
                yield from batch.to_pylist(maps_as_pydicts="lossy")
        except (pa.ArrowException, ValueError, OverflowError, TypeError, LookupError, OSError) as error:
            raise DataError(f"{uri} is no readable Parquet file: {error}", remedy="fetch or write the file again") from error


def _wanted(uri: str, names: list[str]) -> list[str]:
    if not set(SHAPE_COLUMNS) & set(names):
        raise DataError(
            f"{uri} has the columns {', '.join(names)}, none of {', '.join(SHAPE_COLUMNS)}",
            remedy="rename the column that holds the conversations",
        )
    return [name for name in names if name in _COLUMNS]
