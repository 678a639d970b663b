"""Samples as Parquet, one folder a bucket: `bucket=k/part-00000.parquet`, in row groups sized for random access.

Invariant: a bucket's samples keep the order in which they came; the manifest lists the shards bucket by bucket, and a
sample's global row number counts through them in that order.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dflash.data.parquet import versioned_schema
from dflash.records import ShardEntry
from dflash.records.data import DATA_SCHEMA_VERSION
from dflash.storage import fsync_dir, sha256_file

SAMPLE_SCHEMA = versioned_schema(
    pa.schema(
        [
            ("sample_id", pa.string()),
            ("kind", pa.string()),
            ("input_ids", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.bool_())),
            ("length", pa.int32()),
            ("supervised", pa.int32()),
        ]
    ),
    DATA_SCHEMA_VERSION,
)


@dataclass(frozen=True, slots=True)
class TokenizedSample:
    """One sample on its way to a shard: [n] ids and [n] mask."""

    sample_id: str
    kind: str
    input_ids: Sequence[int]
    loss_mask: Sequence[bool]


@dataclass(slots=True)
class _BucketFile:
    """The open file of one bucket and the rows that wait for the next row group."""

    parts: int = 0
    rows_written: int = 0
    writer: pq.ParquetWriter | None = None
    path: Path = field(default_factory=Path)
    waiting: list[TokenizedSample] = field(default_factory=list)


class ShardWriter:
    """Writes samples into a data set's folder.

    Args:
        folder: the data set's folder; must exist.
        buckets: number of buckets.
        rows_per_shard: rows of one file; rows_per_group: rows of one row group.
    """

    def __init__(self, folder: Path, *, buckets: int, rows_per_shard: int, rows_per_group: int) -> None:
        self._folder = folder
        self._rows_per_shard = rows_per_shard
        self._rows_per_group = min(rows_per_group, rows_per_shard)
        self._files = [_BucketFile() for _ in range(buckets)]
        self._shards: list[ShardEntry] = []

    def add(self, sample: TokenizedSample, *, bucket: int) -> None:
        """Append one sample to its bucket."""
        file = self._files[bucket]
        file.waiting.append(sample)
        room = self._rows_per_shard - file.rows_written
        if len(file.waiting) >= min(self._rows_per_group, room):
            writer = self._flush_group(bucket)
            if file.rows_written >= self._rows_per_shard:
                self._close_shard(bucket, writer)

    def close(self) -> tuple[ShardEntry, ...]:
        """Finish all files durably.

        Returns:
            Every shard, bucket by bucket, paths relative to the folder.
        """
        for bucket, file in enumerate(self._files):
            if file.waiting:
                self._flush_group(bucket)
            if file.writer is not None:
                self._close_shard(bucket, file.writer)
        return tuple(sorted(self._shards, key=lambda shard: (shard.bucket, shard.path)))

    def abort(self) -> None:
        """Close the open files without finishing them; the folder is about to be removed."""
        for file in self._files:
            if file.writer is not None:
                file.writer.close()
                file.writer = None

    def _flush_group(self, bucket: int) -> pq.ParquetWriter:
        file = self._files[bucket]
        if file.writer is None:
            folder = self._folder / f"bucket={bucket}"
            folder.mkdir(exist_ok=True)
            file.path = folder / f"part-{file.parts:05d}.parquet"
            file.writer = pq.ParquetWriter(
                file.path, SAMPLE_SCHEMA, compression="zstd", use_dictionary=["kind"], write_page_checksum=True
            )
        file.writer.write_table(_table(file.waiting), row_group_size=len(file.waiting))
        file.rows_written += len(file.waiting)
        file.waiting.clear()
        return file.writer

    def _close_shard(self, bucket: int, writer: pq.ParquetWriter) -> None:
        writer.close()
        file = self._files[bucket]
        with file.path.open("rb") as written:
            os.fsync(written.fileno())
        fsync_dir(file.path.parent)
        self._shards.append(
            ShardEntry(
                path=str(file.path.relative_to(self._folder)),
                bucket=bucket,
                rows=file.rows_written,
                size_bytes=file.path.stat().st_size,
                sha256=sha256_file(file.path),
            )
        )
        self._files[bucket] = _BucketFile(parts=file.parts + 1)


def _table(samples: Sequence[TokenizedSample]) -> pa.Table:
    lengths = np.array([len(sample.input_ids) for sample in samples], dtype=np.int32)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    ids = np.fromiter(chain.from_iterable(sample.input_ids for sample in samples), dtype=np.int32)
    mask = np.fromiter(chain.from_iterable(sample.loss_mask for sample in samples), dtype=np.bool_)
    columns = [
        pa.array([sample.sample_id for sample in samples], pa.string()),
        pa.array([sample.kind for sample in samples], pa.string()),
        pa.ListArray.from_arrays(offsets, pa.array(ids)),
        pa.ListArray.from_arrays(offsets, pa.array(mask)),
        pa.array(lengths),
        pa.array([sum(sample.loss_mask) for sample in samples], pa.int32()),
    ]
    return pa.Table.from_arrays(columns, schema=SAMPLE_SCHEMA)
