"""Samples as Parquet, one folder a bucket: `bucket=k/part-<unit>-<number>-<content>.parquet`.

Invariant: a unit's samples keep, inside each bucket, the order in which they came, and the bytes of its shards depend on
nothing but the samples in that order: not on how they were batched, nor on who tokenized them.
A name holds the beginning of the content's SHA-256, so builders that differ never overwrite each other's bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dflash.data.columns import SampleColumns, TokenizedSample
from dflash.data.parquet import versioned_schema
from dflash.data.put import put_by_content
from dflash.data.reader_pages import PAGE_LAYOUT
from dflash.records import ShardEntry
from dflash.records.data import DATA_SCHEMA_VERSION
from dflash.storage import Store

__all__ = ["SAMPLE_SCHEMA", "ShardWriter", "TokenizedSample", "unit_part"]

SAMPLE_SCHEMA = versioned_schema(
    pa.schema(
        [
            ("sample_id", pa.string()),
            ("input_ids", pa.list_(pa.int32())),
            ("loss_spans", pa.list_(pa.int32())),
            ("length", pa.int32()),
            ("supervised", pa.int32()),
            ("source", pa.string()),
            ("turns", pa.int32()),
        ]
    ),
    DATA_SCHEMA_VERSION,
)

GROUP_TOKENS = 1 << 21
"""A row group ends with the sample that reaches this: 8 MiB of ids a bucket is what a builder holds, however long samples are."""

_UNIT_DIGITS = 12


def unit_part(unit: str) -> str:
    """The beginning of a unit's id that file names bear."""
    return unit[:_UNIT_DIGITS]


@dataclass(slots=True)
class _BucketFile:
    """The open file of one bucket and the rows that wait for the next row group."""

    parts: int = 0
    rows_written: int = 0
    writer: pq.ParquetWriter | None = None
    path: Path = field(default_factory=Path)
    waiting: list[SampleColumns] = field(default_factory=list)
    waiting_rows: int = 0
    waiting_tokens: int = 0


class ShardWriter:
    """Writes the samples of one unit into a data set's store.

    Args:
        store: receives finished shards.
        scratch: local folder for unfinished ones; on the store's file system nothing is copied.
        unit: id of the unit.
        rows_per_shard: rows of one file.
        rows_per_group: rows of one row group at most; GROUP_TOKENS bounds it too.
    """

    def __init__(self, store: Store, scratch: Path, *, unit: str, rows_per_shard: int, rows_per_group: int) -> None:
        self._store = store
        self._scratch = scratch
        self._unit = unit
        self._rows_per_shard = rows_per_shard
        self._rows_per_group = min(rows_per_group, rows_per_shard)
        self._files: dict[int, _BucketFile] = {}
        self._shards: list[ShardEntry] = []

    def add(self, samples: SampleColumns, *, buckets: NDArray[np.int64]) -> None:
        """Append samples to their buckets ([n] bucket of each)."""
        for bucket in np.unique(buckets).tolist():
            rows = np.flatnonzero(buckets == bucket)
            file = self._files.setdefault(bucket, _BucketFile())
            own = samples if len(rows) == len(samples) else samples.take(rows)
            file.waiting.append(own)
            file.waiting_rows += len(own)
            file.waiting_tokens += len(own.input_ids)
            self._flush_full_groups(bucket, file)

    def close(self) -> tuple[ShardEntry, ...]:
        """Finish all files and put them into the store.

        Returns:
            Every shard, bucket by bucket.
        """
        for bucket, file in self._files.items():
            if file.waiting_rows:
                self._write_group(bucket, file, _merged(file))
            if file.writer is not None:
                self._close_shard(bucket, file, file.writer)
        return tuple(sorted(self._shards, key=lambda shard: (shard.bucket, shard.path)))

    def abort(self) -> None:
        """Close the open files without finishing them; the scratch folder is about to be removed."""
        for file in self._files.values():
            if file.writer is not None:
                file.writer.close()
                file.writer = None

    def _flush_full_groups(self, bucket: int, file: _BucketFile) -> None:
        """Write row groups that later samples cannot change: full ones, in rows or in tokens."""
        if file.waiting_rows < self._room(file) and file.waiting_tokens < GROUP_TOKENS:
            return
        waiting, start = _merged(file), 0
        ends = np.cumsum(waiting.lengths, dtype=np.int64)
        while True:
            before = int(ends[start - 1]) if start else 0
            full_at = int(np.searchsorted(ends, before + GROUP_TOKENS)) + 1  # the sample that reaches the bound is the last
            stop = min(full_at, start + self._room(file))
            if stop > len(waiting):
                break
            writer = self._write_group(bucket, file, waiting.cut(start, stop))
            start = stop
            if file.rows_written >= self._rows_per_shard:
                self._close_shard(bucket, file, writer)
        # A copy: a view would keep the whole batch alive.
        rest = waiting.take(np.arange(start, len(waiting)))
        file.waiting, file.waiting_rows, file.waiting_tokens = [rest], len(rest), len(rest.input_ids)

    def _room(self, file: _BucketFile) -> int:
        return min(self._rows_per_group, self._rows_per_shard - file.rows_written)

    def _write_group(self, bucket: int, file: _BucketFile, group: SampleColumns) -> pq.ParquetWriter:
        if file.writer is None:
            file.path = self._scratch / f"bucket-{bucket}-{file.parts:05d}.parquet"
            file.writer = pq.ParquetWriter(file.path, SAMPLE_SCHEMA, **PAGE_LAYOUT)
        file.writer.write_table(samples_table(group), row_group_size=len(group))
        file.rows_written += len(group)
        return file.writer

    def _close_shard(self, bucket: int, file: _BucketFile, writer: pq.ParquetWriter) -> None:
        writer.close()
        stem = f"bucket={bucket}/part-{unit_part(self._unit)}-{file.parts:05d}"
        name, size_bytes, sha256 = put_by_content(self._store, stem, file.path)
        entry = ShardEntry(path=name, bucket=bucket, rows=file.rows_written, size_bytes=size_bytes, sha256=sha256)
        file.path.unlink()
        self._shards.append(entry)
        file.parts, file.rows_written, file.writer = file.parts + 1, 0, None


def samples_table(samples: SampleColumns) -> pa.Table:
    """Samples as an Arrow table of `SAMPLE_SCHEMA`."""
    columns = [
        pa.array(samples.sample_ids, pa.string()),
        _lists(samples.lengths, samples.input_ids),
        _lists(2 * samples.span_counts, samples.loss_spans),
        pa.array(samples.lengths),
        pa.array(samples.supervised),
        pa.array(samples.sources, pa.string()),
        pa.array(samples.turns),
    ]
    return pa.Table.from_arrays(columns, schema=SAMPLE_SCHEMA)


def columns_of_table(table: pa.Table) -> SampleColumns:
    """The inverse of `samples_table`."""
    ids, spans = (table[name].combine_chunks() for name in ("input_ids", "loss_spans"))
    return SampleColumns(
        sample_ids=table["sample_id"].to_pylist(),
        sources=table["source"].to_pylist(),
        input_ids=ids.flatten().to_numpy(),
        lengths=ids.value_lengths().to_numpy(),
        loss_spans=spans.flatten().to_numpy(),
        span_counts=spans.value_lengths().to_numpy() // 2,
        turns=table["turns"].to_numpy(),
    )


def _lists(counts: NDArray[np.int32], values: NDArray[np.int32]) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.ascontiguousarray(values)))


def _merged(file: _BucketFile) -> SampleColumns:
    merged = file.waiting[0] if len(file.waiting) == 1 else SampleColumns.joined(file.waiting)
    file.waiting, file.waiting_rows, file.waiting_tokens = [], 0, 0
    return merged
