"""Reading samples by row number, and collating planned batches.

A plan visits rows in random order, so a sample is read as the one page that holds it (see `reader_pages`): from a memory map
of a local data set, by ranged reads of one in an object store, where all pages of a batch are asked for at once.

Invariant: a batch is right-padded (safe on every model family) to exactly the padded length that its plan stores.
The price in memory: 5 bytes a row (length and bucket), under 100 bytes a row group, and `reader.cache_mib`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dflash.config.data import ReaderConfig
from dflash.data.manifest import read_manifest
from dflash.data.reader_access import RawReader, RawSample
from dflash.data.reader_files import CONNECTIONS, DAMAGE, ShardBytes, ShardFooter, damaged, open_shard_bytes, read_footer
from dflash.data.reader_prefetch import prefetch
from dflash.errors import DataError
from dflash.records import PlannedBatch
from dflash.storage import open_store

_NO_LENGTHS = np.empty(0, np.int32)


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


class SampleStore:
    """Random access to the samples of a data set, from any number of threads; use as a context manager, or call `close`.

    Args:
        location: folder or `s3://bucket/prefix` of a complete data set.
        fingerprint: of the version that is meant; the newest if None.
        reader: bytes to keep, and how much to verify on opening.

    Attributes:
        manifest: the data set's manifest.
        rows: number of samples.
        lengths: [rows] int32 tokens of each sample.
        buckets: [rows] int8 bucket of each sample.

    Raises:
        SchemaVersionError: a file was written with another schema version.
        DataError: the data set is incomplete or damaged.
        StorageError: it cannot be reached.
    """

    def __init__(self, location: str | Path, *, fingerprint: str | None, reader: ReaderConfig) -> None:
        store = open_store(location)
        self.manifest = read_manifest(store, fingerprint=fingerprint, verify=reader.verify)
        shards = self.manifest.shards
        self.rows = sum(shard.rows for shard in shards)
        self.buckets: NDArray[np.int8] = np.repeat(
            np.array([shard.bucket for shard in shards], np.int8), [shard.rows for shard in shards]
        )
        self.lengths: NDArray[np.int32] = np.empty(self.rows, np.int32)
        self._source: ShardBytes = open_shard_bytes(store, shards)
        try:
            footers = self._read_footers(store.uri, connections=CONNECTIONS if store.local_root is None else 1)
        except BaseException:
            self._source.close()
            raise
        self._reader = RawReader(
            self._source, store.uri, shards, footers=footers, lengths=self.lengths, cache_bytes=reader.cache_mib * 2**20
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files; the store is of no use afterwards."""
        self._source.close()

    def read(self, rows: Sequence[int]) -> list[Sample]:
        """The samples of global row numbers, in the order asked for; their arrays are read-only.

        Raises:
            DataError: no such row, or its bytes are damaged.
        """
        samples = []
        for raw in self.read_raw(rows):
            width = len(raw.input_ids)
            mask = _loss_mask([raw.loss_spans], np.array([width]), width=width)[0]
            mask.setflags(write=False)
            samples.append(Sample(raw.input_ids, mask))
        return samples

    def read_raw(self, rows: Sequence[int]) -> list[RawSample]:
        """The samples as they are stored, in the order asked for.

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
        return self._reader.read(wanted)

    def _read_footers(self, uri: str, *, connections: int) -> list[ShardFooter]:
        """Every shard's footer, its lengths moved into the one array of all."""
        shards = self.manifest.shards

        def read_one(number: int) -> ShardFooter:
            try:
                footer = read_footer(self._source, number, shards[number])
            except DAMAGE as error:
                raise damaged(uri, shards[number], error) from error
            self.lengths[starts[number] : starts[number] + shards[number].rows] = footer.lengths
            return replace(footer, lengths=_NO_LENGTHS)

        rows = np.array([shard.rows for shard in shards], np.int64)
        starts = (np.cumsum(rows) - rows).tolist()
        with ThreadPoolExecutor(connections, thread_name_prefix="footer") as pool:
            return list(pool.map(read_one, range(len(shards))))


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
    samples = store.read_raw(planned.rows)
    lengths = np.array([len(sample.input_ids) for sample in samples], dtype=np.int64)
    width = planned.padded_length_tokens
    if lengths.max(initial=0) > width:
        raise DataError(
            f"batch {planned.position} is planned for {width} tokens, a sample of it has {lengths.max()}",
            remedy="use a plan that was made for this data set",
        )
    input_ids = np.full((len(samples), width), pad_id, dtype=np.int64)
    for row, sample in zip(input_ids, samples, strict=True):
        row[: len(sample.input_ids)] = sample.input_ids
    mask = _loss_mask([sample.loss_spans for sample in samples], lengths, width=width)
    return Batch(planned, input_ids, mask, lengths)


def read_batches(
    planned: Iterable[PlannedBatch], store: SampleStore, *, pad_id: int, reader: ReaderConfig
) -> Generator[Batch, None, None]:
    """Collated batches in the order of the plan, read ahead by threads; close the generator to end them.

    Raises:
        DataError: see `collate`; batches before the damaged one are delivered first.
    """
    return prefetch(
        planned, lambda batch: collate(batch, store, pad_id=pad_id), threads=reader.threads, ahead=reader.prefetch_batches
    )


def _loss_mask(spans: Sequence[NDArray[np.int32]], lengths: NDArray[np.int64], *, width: int) -> NDArray[np.bool_]:
    """[B, width] mask of half-open spans, each [2 k] flat, inside the [B] lengths."""
    pairs = np.concatenate([np.empty(0, np.int32), *spans]).astype(np.int64)
    owners = np.repeat(np.arange(len(spans)), [len(own) // 2 for own in spans])
    starts, ends = pairs[::2], pairs[1::2]
    if len(pairs) % 2 or (starts < 0).any() or (starts >= ends).any() or (ends > lengths[owners]).any():
        raise DataError("a sample's loss spans leave the sample", remedy="build the data set again")
    steps = np.zeros(len(spans) * width + 1, np.int8)
    np.add.at(steps, owners * width + starts, 1)
    np.add.at(steps, owners * width + ends, -1)
    return np.cumsum(steps[:-1], dtype=np.int8).astype(np.bool_).reshape(len(spans), width)
