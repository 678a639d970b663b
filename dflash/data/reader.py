"""Reading samples by row number, and collating planned batches.

Row groups are decoded once and kept in a cache bounded in bytes (least recently used goes first), because a plan visits
rows in random order and a row group is the smallest thing Parquet can decode.

Invariant: a batch is right-padded (safe on every model family) to exactly the padded length that its plan stores.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dflash.data.manifest import read_manifest, read_prompt_hashes_of
from dflash.data.parquet import open_parquet, read_columns
from dflash.data.shards import SAMPLE_SCHEMA
from dflash.errors import DataError
from dflash.records import PlannedBatch
from dflash.records.data import DATA_SCHEMA_VERSION

CACHE_BYTES = 256 * 2**20
"""Decoded samples that a store keeps; 50 million tokens."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample: [n] int32 ids and [n] bool mask."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Batch:
    """One collated micro-batch, right-padded to `planned.padded_length_tokens` = S.

    Attributes:
        input_ids: [B, S] int64; padding is the pad id.
        loss_mask: [B, S] bool; False on padding.
        lengths: [B] int64.
    """

    planned: PlannedBatch
    input_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    lengths: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.input_ids.nbytes + self.loss_mask.nbytes + self.lengths.nbytes


@dataclass(frozen=True, slots=True)
class _RowGroup:
    """Decoded samples of one row group, end to end: sample i is [offsets[i], offsets[i+1])."""

    offsets: NDArray[np.int64]
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]

    @property
    def nbytes(self) -> int:
        return self.offsets.nbytes + self.input_ids.nbytes + self.loss_mask.nbytes


class SampleStore:
    """Random access to the samples of a data set; use as a context manager, or call `close`.

    Args:
        data_dir: a complete data set.

    Attributes:
        manifest: the data set's manifest.
        rows: number of samples.
        lengths: [rows] int32 tokens of each sample.
        buckets: [rows] int32 bucket of each sample.

    Raises:
        SchemaVersionError: a file was written with another schema version.
        DataError: the data set is incomplete or damaged.
    """

    def __init__(self, data_dir: Path) -> None:
        self.manifest = read_manifest(data_dir, verify=False)
        self._open_files = ExitStack()
        self._groups: list[tuple[pq.ParquetFile, Path, int]] = []
        lengths: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
        group_rows: list[int] = []
        for shard in self.manifest.shards:
            path = data_dir / shard.path
            file = self._open_files.enter_context(open_parquet(path, SAMPLE_SCHEMA, version=DATA_SCHEMA_VERSION))
            lengths.append(read_columns(file, path, columns=["length"], group=None)[0].to_numpy())
            if len(lengths[-1]) != shard.rows:
                raise DataError(
                    f"{path} has {len(lengths[-1])} rows, the manifest says {shard.rows}",
                    remedy=f"remove {data_dir} and build the data set again",
                )
            for group in range(file.num_row_groups):
                self._groups.append((file, path, group))
                group_rows.append(file.metadata.row_group(group).num_rows)
        self._group_ends = np.cumsum(group_rows, dtype=np.int64)
        self.lengths: NDArray[np.int32] = np.concatenate(lengths)
        shards = self.manifest.shards
        self.buckets: NDArray[np.int32] = np.repeat(
            np.array([shard.bucket for shard in shards], np.int32), [shard.rows for shard in shards]
        )
        self.rows = len(self.lengths)
        self._cache: OrderedDict[int, _RowGroup] = OrderedDict()
        self._cached_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; the store is of no use afterwards."""
        self._open_files.close()

    def read(self, rows: Sequence[int]) -> list[Sample]:
        """The samples of global row numbers, in the order asked for.

        Raises:
            DataError: no such row, or its bytes are damaged.
        """
        wanted = np.asarray(rows, dtype=np.int64)
        outside = wanted[(wanted < 0) | (wanted >= self.rows)]
        if len(outside):
            raise DataError(
                f"row {outside[0]} is asked for, the data set has the rows 0..{self.rows - 1}",
                remedy="use a plan that was made for this data set",
            )
        groups = np.searchsorted(self._group_ends, wanted, side="right")
        samples: list[Sample | None] = [None] * len(wanted)
        # Group by group, so that even a full cache decodes each row group once a batch.
        for place in np.argsort(groups, kind="stable").tolist():
            group = int(groups[place])
            data = self._group(group)
            first_row = int(self._group_ends[group - 1]) if group else 0
            index = int(wanted[place]) - first_row
            span = slice(int(data.offsets[index]), int(data.offsets[index + 1]))
            samples[place] = Sample(data.input_ids[span], data.loss_mask[span])
        return [sample for sample in samples if sample is not None]

    def _group(self, number: int) -> _RowGroup:
        cached = self._cache.get(number)
        if cached is not None:
            self._cache.move_to_end(number)
            return cached
        file, path, group = self._groups[number]
        ids, mask = read_columns(file, path, columns=["input_ids", "loss_mask"], group=group)
        offsets = np.concatenate([[0], np.cumsum(ids.value_lengths().to_numpy())]).astype(np.int64)
        data = _RowGroup(offsets, _frozen(ids.flatten().to_numpy()), _frozen(mask.flatten().to_numpy(zero_copy_only=False)))
        self._cache[number] = data
        self._cached_bytes += data.nbytes
        while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
            _, oldest = self._cache.popitem(last=False)
            self._cached_bytes -= oldest.nbytes
        return data


def collate(planned: PlannedBatch, store: SampleStore, *, pad_id: int) -> Batch:
    """Read a planned batch and pad it on the right.

    Args:
        planned: names rows and the padded length S.
        store: the data set that the plan was made for.
        pad_id: id written behind the samples.

    Returns:
        [B, S] arrays.

    Raises:
        DataError: a sample is longer than the plan says, or the data is damaged.
    """
    samples = store.read(planned.rows)
    lengths = np.array([len(sample.input_ids) for sample in samples], dtype=np.int64)
    width = planned.padded_length_tokens
    if lengths.max(initial=0) > width:
        raise DataError(
            f"batch {planned.position} is planned for {width} tokens, a sample of it has {lengths.max()}",
            remedy="use a plan that was made for this data set",
        )
    real = np.arange(width) < lengths[:, None]
    input_ids = np.full(real.shape, pad_id, dtype=np.int64)
    loss_mask = np.zeros(real.shape, dtype=np.bool_)
    input_ids[real] = np.concatenate([sample.input_ids for sample in samples])
    loss_mask[real] = np.concatenate([sample.loss_mask for sample in samples])
    return Batch(planned, input_ids, loss_mask, lengths)


def read_prompt_hashes(data_dir: Path) -> frozenset[str]:
    """Normalised hashes of every user turn that the data set's samples were made from.

    Raises:
        DataError: the data set is incomplete, or the list is not the one that was written.
    """
    return read_prompt_hashes_of(data_dir, read_manifest(data_dir, verify=False))


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    """The array, read-only: samples are views into a shared cache."""
    array.setflags(write=False)
    return array
