"""Lengths and buckets in, epochs of packed and ordered batches out; pure numpy, one epoch at a time.

Invariant: every sample is in exactly one batch of every epoch, a batch holds samples of one bucket (but for the order `random`),
and `sequences x padded length` never exceeds the token budget. An epoch is a function of (lengths, settings, seed, epoch); only
where its order begins looks back at the previous one.
Price, one core, edges and writing included: 10 M samples in 0.9 s and 270 MB, 100 M in 12 s and 1.9 GB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash.config import PlanConfig
from dflash.data.buckets import count_lengths
from dflash.data.cost_groups import group_by_cost
from dflash.data.interleave import NOTHING_YET, RunEnd, end_of, interleave_epoch, shortest_feasible_run
from dflash.data.packing import Packed, count_rungs, pack_in_order, pack_sorted, padded_lengths, sort_windows
from dflash.data.plan_arrays import EpochArrays, row_dtype

IntArray = NDArray[np.int64]

_PACK, _BATCH_ORDER, _INTERLEAVE = range(3)
"""Purposes of random streams: each is keyed by (seed, purpose, epoch, bucket), never shared."""
_GATHER_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class _Bucket:
    """The samples of one bucket.

    Attributes:
        rows: [n] global rows, ascending by rung.
        rungs: [d] rungs that occur; counts: [d] samples of each.
    """

    rows: NDArray[Any]
    rungs: IntArray
    counts: IntArray


class Planner:
    """Packs and orders the samples of a data set, epoch by epoch.

    Args:
        lengths: [n] length of each sample, in tokens.
        buckets: [n] bucket of each sample.
        plan: budgets, limits and order.
        seed: decides everything random, together with the epoch.
        epochs: passes over the samples.

    Attributes:
        padded: the padded lengths that batches may have.

    Raises:
        DataError: there is no sample, or one does not fit into a batch.
    """

    def __init__(self, lengths: NDArray[Any], buckets: NDArray[Any], *, plan: PlanConfig, seed: int, epochs: int) -> None:
        self._lengths = lengths
        self._bucket_of_row = buckets
        self._plan = plan
        self._seed = seed
        self._epochs = epochs
        self._made = 0
        self.padded = padded_lengths(count_lengths(lengths, longest=None), plan=plan)
        self._capacity = self.padded.capacity(plan)
        self._buckets = [] if plan.order == "random" else [self._members(k) for k in range(int(buckets.max()) + 1)]

    def epochs(self) -> Iterator[EpochArrays]:
        """The epochs in order; each is made when it is asked for."""
        after, self._made = NOTHING_YET, 0
        for epoch in range(self._epochs):
            arrays = self._random_epoch(epoch) if self._plan.order == "random" else self._epoch(epoch, after)
            after = end_of(arrays.bucket, after=after)
            self._made += len(arrays)
            yield arrays

    def _members(self, bucket: int) -> _Bucket:
        rows = np.flatnonzero(self._bucket_of_row == bucket).astype(row_dtype(len(self._lengths)))
        rungs = self._rungs_of(rows)
        rows = rows[np.argsort(rungs, kind="stable")]
        counts = count_rungs(rungs, window=max(1, len(rungs)), distinct=len(self.padded.tokens)).sum(axis=0)
        present = np.flatnonzero(counts)
        return _Bucket(rows, present, counts[present])

    def _rungs_of(self, rows: NDArray[Any]) -> NDArray[Any]:
        rungs = np.empty(len(rows), self.padded.rung_of_length.dtype)
        for start in range(0, len(rows), _GATHER_CHUNK):
            part = slice(start, start + _GATHER_CHUNK)
            rungs[part] = self.padded.rung_of_length[self._lengths[rows[part]]]
        return rungs

    def _epoch(self, epoch: int, after: RunEnd) -> EpochArrays:
        rows = np.empty(len(self._lengths), row_dtype(len(self._lengths)))
        packs, filled = [], 0
        for number, bucket in enumerate(self._buckets):
            own = rows[filled : filled + len(bucket.rows)]
            packs.append(self._pack(bucket, own, _rng(self._seed, _PACK, epoch, number)))
            filled += len(own)
        counts = [len(packed.size) for packed in packs]
        size = np.concatenate([packed.size for packed in packs])
        rung = np.concatenate([packed.rung for packed in packs])
        bucket_of_batch = np.repeat(np.arange(len(packs)), counts)
        return self._ordered(rows, size, rung, bucket_of_batch, self._order(rung, counts, epoch=epoch, after=after))

    def _pack(self, bucket: _Bucket, rows: NDArray[Any], rng: np.random.Generator) -> Packed:
        """Fill `rows` with the bucket's rows in the order of its batches."""
        window = self._plan.sort_window_samples
        rows[:] = bucket.rows
        counts = bucket.counts[None]
        if window is None or window >= len(rows):  # every rung is together already: only who meets whom is drawn
            for count, end in zip(bucket.counts.tolist(), np.cumsum(bucket.counts).tolist(), strict=True):
                rng.shuffle(rows[end - count : end])
        else:
            rng.shuffle(rows)
            rungs = np.searchsorted(bucket.rungs, self._rungs_of(rows)).astype(self.padded.rung_of_length.dtype)
            rows[:] = rows[sort_windows(rungs, window=window)]
            counts = count_rungs(rungs, window=window, distinct=len(bucket.rungs))
        packed = pack_sorted(counts, self._capacity[bucket.rungs])
        return Packed(packed.size, bucket.rungs[packed.rung])

    def _order(self, rung: IntArray, counts: Sequence[int], *, epoch: int, after: RunEnd) -> IntArray:
        """[b] the batch at each place of the epoch; batches are numbered bucket by bucket."""
        rng = _rng(self._seed, _INTERLEAVE, epoch, 0)
        if self._plan.order == "shuffle":
            return rng.permutation(len(rung))
        if self._plan.order == "sorted":
            return np.lexsort((rng.random(len(rung)), rung))
        limit = run_limit(counts, self._plan, epochs=self._epochs)
        order = interleave_epoch(counts, limit=limit, after=after, epochs_after=self._epochs - epoch - 1, rng=rng)
        batches = np.empty(len(rung), np.int64)
        first = 0
        for number, count in enumerate(counts):
            batches[order == number] = first + _rng(self._seed, _BATCH_ORDER, epoch, number).permutation(count)
            first += count
        return batches

    def _random_epoch(self, epoch: int) -> EpochArrays:
        """Rows in random order, packed as they come."""
        rows = np.arange(len(self._lengths), dtype=row_dtype(len(self._lengths)))
        _rng(self._seed, _PACK, epoch, 0).shuffle(rows)
        packed = pack_in_order(self._rungs_of(rows), self.padded, plan=self._plan)
        starts = np.cumsum(packed.size) - packed.size
        highest = np.maximum.reduceat(self._bucket_of_row[rows], starts)
        return self._ordered(rows, packed.size, packed.rung, highest, np.arange(len(starts)))

    def _ordered(self, rows: NDArray[Any], size: IntArray, rung: IntArray, bucket: NDArray[Any], batches: IntArray) -> EpochArrays:
        starts = np.cumsum(size) - size
        if self._plan.equal_cost_neighbours > 1:
            costs = size[batches] * self.padded.tokens[rung[batches]]
            batches = batches[group_by_cost(costs, size=self._plan.equal_cost_neighbours, first=self._made)]
        return EpochArrays(
            rows=rows,
            start=starts[batches].astype(rows.dtype),
            size=size[batches].astype("<u4"),
            padded_length=self.padded.tokens[rung[batches]].astype("<u4"),
            bucket=bucket[batches].astype("<u2"),
        )


def run_limit(counts: Sequence[int], plan: PlanConfig, *, epochs: int) -> int:
    """Longest run that an interleaved order keeps: the configured one, or the shortest that this mix of buckets allows."""
    return max(plan.max_bucket_run, shortest_feasible_run(counts, epochs=epochs))


def _rng(seed: int, purpose: int, epoch: int, bucket: int) -> np.random.Generator:
    return np.random.default_rng((seed, purpose, epoch, bucket))
