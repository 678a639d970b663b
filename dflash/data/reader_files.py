"""Byte ranges of a data set's shards, from memory maps or from an object store, and what a shard's footer says.

Invariant: a range is returned whole or an error names the shard; a mapped file has the size that the manifest gives.
"""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dflash.data.parquet import VERSION_KEY
from dflash.data.reader_pages import Bytes, PageDefect, decode_values, parse_struct, split_pages
from dflash.data.shards import SAMPLE_SCHEMA
from dflash.errors import DataError, SchemaVersionError
from dflash.records import ShardEntry
from dflash.records.data import DATA_SCHEMA_VERSION
from dflash.storage import Store

MAPPED_FILES = 256
"""Files mapped at once: a map holds a descriptor, and a process has about a thousand."""

CONNECTIONS = 16
"""Ranges asked from an object store at once: a request costs tens of milliseconds, whatever its size up to a megabyte."""

_TAIL_BYTES = 64 * 1024
_MAGIC = b"PAR1"
_COLUMNS = {"input_ids": 0, "loss_spans": 1}

Range = tuple[int, int, int]
"""Shard number, first byte, number of bytes."""


class ShardBytes(Protocol):
    """Where a data set's bytes come from; safe to use from several threads."""

    def fetch(self, ranges: Sequence[Range]) -> list[Bytes]:
        """The bytes of all ranges, in order."""

    def close(self) -> None:
        """Let go of files and threads."""


def open_shard_bytes(store: Store, shards: Sequence[ShardEntry]) -> ShardBytes:
    """Memory maps if the store is local, ranged reads otherwise."""
    return RangedShards(store, shards) if store.local_root is None else MappedShards(store.local_root, shards)


class MappedShards:
    """Shards in a local folder, mapped when they are first needed."""

    def __init__(self, root: Path, shards: Sequence[ShardEntry]) -> None:
        self._root, self._shards = root, shards
        self._maps: OrderedDict[int, memoryview] = OrderedDict()
        self._lock = threading.Lock()

    def fetch(self, ranges: Sequence[Range]) -> list[Bytes]:
        """Views into the maps; pages reach memory when they are looked at."""
        found: list[Bytes] = []
        for shard, start, length in ranges:
            view = self._map(shard)
            if start < 0 or length < 0 or start + length > len(view):
                raise PageDefect(f"bytes {start} to {start + length} are asked for, it has {len(view)}")
            found.append(view[start : start + length])
        return found

    def close(self) -> None:
        """Forget the maps; each ends with the last view into it."""
        with self._lock:
            self._maps.clear()

    def _map(self, shard: int) -> memoryview:
        with self._lock:
            view = self._maps.get(shard)
            if view is not None:
                self._maps.move_to_end(shard)
                return view
            entry = self._shards[shard]
            with (self._root / entry.path).open("rb") as file:
                view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            if len(view) != entry.size_bytes:
                raise PageDefect(f"it has {len(view)} bytes, the manifest says {entry.size_bytes}")
            self._maps[shard] = view
            if len(self._maps) > MAPPED_FILES:
                self._maps.popitem(last=False)
            return view


class RangedShards:
    """Shards in an object store, read by ranges over several connections."""

    def __init__(self, store: Store, shards: Sequence[ShardEntry]) -> None:
        self._store, self._shards = store, shards
        self._pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="shard-range")

    def fetch(self, ranges: Sequence[Range]) -> list[Bytes]:
        """The bytes of all ranges; neighbours without a gap travel together."""
        order = sorted(range(len(ranges)), key=ranges.__getitem__)
        runs: list[list[int]] = []
        end = (-1, -1)
        for place in order:
            shard, start, length = ranges[place]
            if (shard, start) == end:
                runs[-1].append(place)
            else:
                runs.append([place])
            end = (shard, start + length)
        found: list[Bytes] = [b""] * len(ranges)
        for run, data in zip(runs, self._pool.map(lambda run: self._read([ranges[place] for place in run]), runs), strict=True):
            view = memoryview(data)
            for place in run:
                found[place], view = view[: ranges[place][2]], view[ranges[place][2] :]
        return found

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _read(self, run: Sequence[Range]) -> bytes:
        shard, start, _ = run[0]
        length = sum(entry[2] for entry in run)
        entry = self._shards[shard]
        if start < 0 or start + length > entry.size_bytes:
            raise PageDefect(f"{entry.path}: bytes {start} to {start + length} are asked for, it has {entry.size_bytes}")
        return self._store.read_range(entry.path, start=start, length=length)


@dataclass(frozen=True, slots=True)
class ShardFooter:
    """What random access needs of a shard's footer.

    Attributes:
        group_rows: [g] rows of each row group.
        page_indexes: [g, 2, 2] first byte and bytes of the page index of `input_ids` and of `loss_spans`.
        lengths: [rows] int32 tokens of each sample.
    """

    group_rows: NDArray[np.int64]
    page_indexes: NDArray[np.int64]
    lengths: NDArray[np.int32]


def read_footer(source: ShardBytes, number: int, shard: ShardEntry) -> ShardFooter:
    """Read a shard's footer and its `length` column.

    Raises:
        SchemaVersionError: written with another schema version.
        PageDefect, DataError: damaged, of another schema, or of other counts than the manifest's.
    """
    groups = _row_groups(source, number, shard)
    group_rows = np.array([group[3] for group in groups], np.int64)
    if int(group_rows.sum()) != shard.rows or (group_rows < 1).any():
        raise PageDefect(f"it has {group_rows.sum()} rows, the manifest says {shard.rows}")
    page_indexes = np.zeros((len(groups), len(_COLUMNS), 2), np.int64)
    ranges: list[Range] = []
    for place, group in enumerate(groups):
        chunks = {chunk[3][3][0].decode(): chunk for chunk in group[1]}
        for name, column in _COLUMNS.items():
            page_indexes[place, column] = chunks[name][4], chunks[name][5]
        meta = chunks["length"][3]
        ranges.append((number, meta[9], meta[7]))
    lengths: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
    for chunk in source.fetch(ranges):
        lengths += [decode_values(page, values=rows, rows=rows) for page, rows in split_pages(chunk)]
    joined = np.concatenate(lengths)
    if len(joined) != shard.rows or (joined < 1).any():
        raise PageDefect(f"it has {len(joined)} lengths, the manifest says {shard.rows} rows")
    return ShardFooter(group_rows, page_indexes, joined)


def _row_groups(source: ShardBytes, number: int, shard: ShardEntry) -> list[dict[int, Any]]:
    size = shard.size_bytes
    held = min(size, _TAIL_BYTES)
    [tail] = source.fetch([(number, size - held, held)])
    footer_bytes = int.from_bytes(tail[-8:-4], "little") + 8
    if bytes(tail[-4:]) != _MAGIC or footer_bytes > size:
        raise PageDefect("it is no Parquet file")
    if footer_bytes > held:
        [tail] = source.fetch([(number, size - footer_bytes, footer_bytes)])
    _check_schema(tail, shard)
    groups: list[dict[int, Any]] = parse_struct(bytes(tail[-footer_bytes:-8]), 0)[0].get(4, [])
    return groups


def _check_schema(tail: Bytes, shard: ShardEntry) -> None:
    schema = pq.read_metadata(pa.BufferReader(pa.py_buffer(tail))).schema.to_arrow_schema()
    found = (schema.metadata or {}).get(VERSION_KEY, b"none").decode(errors="replace")
    if found != str(DATA_SCHEMA_VERSION):
        raise SchemaVersionError(
            f"{shard.path} has schema version {found}, this code reads {DATA_SCHEMA_VERSION}",
            remedy="build it again with this version of the code, or use the version that wrote it",
        )
    if not schema.equals(SAMPLE_SCHEMA):
        raise PageDefect(f"it has the columns {schema.names}, not {SAMPLE_SCHEMA.names} of the right types")


DAMAGE = (PageDefect, OSError, LookupError, TypeError, ValueError, OverflowError, AttributeError, pa.ArrowException)
"""Whatever damaged bytes cause."""


def damaged(uri: str, shard: ShardEntry, error: BaseException) -> DataError:
    """The error of a shard that cannot be read."""
    reason = str(error) if isinstance(error, PageDefect | OSError | pa.ArrowException) else "its bytes make no sense"
    return DataError(f"{uri}/{shard.path} cannot be read: {reason}", remedy="restore the file or build it again")
