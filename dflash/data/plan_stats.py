"""What an epoch of a plan looks like in numbers: padding and mix of every bucket, runs, and what simpler plans would cost; pure.

`efficiency` is always real tokens / padded tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash.data.interleave import NOTHING_YET, longest_run, run_lengths
from dflash.data.plan_arrays import EpochArrays

NAIVE_SEQUENCES = 16
"""Sequences of a batch that takes samples as they come."""
MIX_WINDOWS = 60
"""Stretches of the epoch whose mix is shown."""
HISTOGRAM_BINS = 80


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One bucket in one epoch.

    Attributes:
        edge_tokens: inclusive upper edge.
        batch_share: of all batches of the epoch.
        longest_run: consecutive batches of it.
        last_strides: how long before the epoch's end its last batch comes, in strides (batches of the epoch / its own).
    """

    bucket: int
    edge_tokens: int
    samples: int
    tokens: int
    batches: int
    padded_tokens: int
    efficiency: float
    batch_share: float
    longest_run: int
    last_strides: float


@dataclass(frozen=True, slots=True)
class PlanStats:
    """One epoch.

    Attributes:
        padded_lengths_tokens: distinct padded lengths that batches have.
        naive_efficiency: random batches of `NAIVE_SEQUENCES`, each padded to its longest sample.
        edges_efficiency: every sample padded to its bucket's upper edge.
        run_counts: (length of a run, runs of that length), ascending.
        length_counts: [`HISTOGRAM_BINS`] samples by length; bin i ends at `length_edges[i + 1]`.
        mix: [windows][buckets] share of the batches of each of `MIX_WINDOWS` stretches of the epoch.
    """

    buckets: tuple[BucketPlan, ...]
    samples: int
    tokens: int
    batches: int
    padded_tokens: int
    efficiency: float
    naive_efficiency: float
    edges_efficiency: float
    longest_run: int
    padded_lengths_tokens: tuple[int, ...]
    run_counts: tuple[tuple[int, int], ...]
    length_counts: tuple[int, ...]
    length_edges: tuple[float, ...]
    mix: tuple[tuple[float, ...], ...]


def plan_stats(lengths: NDArray[Any], epoch: EpochArrays, *, edges: Sequence[int]) -> PlanStats:
    """Numbers of one epoch.

    Args:
        lengths: [n] tokens of each sample.
        epoch: its batches.
        edges: inclusive upper edges of the buckets.
    """
    tokens, padded = tokens_per_batch(lengths, epoch), epoch.padded_tokens
    bins, counts = _histogram(lengths)
    runs = np.bincount(run_lengths(epoch.bucket))
    total, total_padded = int(tokens.sum()), int(padded.sum())
    to_edges = np.array(edges)[np.searchsorted(np.array(edges), lengths)].sum(dtype=np.int64)
    return PlanStats(
        buckets=tuple(_bucket(epoch, tokens, padded, number, edge) for number, edge in enumerate(edges)),
        samples=len(lengths),
        tokens=total,
        batches=len(epoch),
        padded_tokens=total_padded,
        efficiency=total / total_padded,
        naive_efficiency=naive_efficiency(lengths, seed=0),
        edges_efficiency=total / int(to_edges),
        longest_run=longest_run(epoch.bucket, after=NOTHING_YET),
        padded_lengths_tokens=tuple(np.unique(epoch.padded_length).tolist()),
        run_counts=tuple((length, int(runs[length])) for length in np.flatnonzero(runs).tolist()),
        length_counts=tuple(counts.tolist()),
        length_edges=tuple(bins.tolist()),
        mix=_mix(epoch.bucket, len(edges)),
    )


def tokens_per_batch(lengths: NDArray[Any], epoch: EpochArrays) -> NDArray[np.int64]:
    """[b] real tokens of each batch, in consumption order."""
    stored = np.argsort(epoch.start)  # every row is in one batch, so the batches lie end to end
    tokens = np.empty(len(epoch), np.int64)
    tokens[stored] = np.add.reduceat(lengths[epoch.rows], epoch.start[stored].astype(np.int64), dtype=np.int64)
    return tokens


def naive_efficiency(lengths: NDArray[Any], *, seed: int) -> float:
    """Efficiency of random batches of `NAIVE_SEQUENCES`, each padded to its longest sample."""
    drawn = np.random.default_rng(seed).permutation(lengths)
    starts = np.arange(0, len(drawn), NAIVE_SEQUENCES)
    longest = np.maximum.reduceat(drawn, starts).astype(np.int64)
    return int(drawn.sum(dtype=np.int64)) / int((longest * np.diff(np.append(starts, len(drawn)))).sum())


def _bucket(epoch: EpochArrays, tokens: NDArray[np.int64], padded: NDArray[np.int64], number: int, edge: int) -> BucketPlan:
    mine = epoch.bucket == number
    batches, own_padded = int(mine.sum()), int(padded[mine].sum())
    runs = run_lengths(mine)
    own_runs = runs[int(not mine[0]) :: 2]
    last = int(np.flatnonzero(mine)[-1]) if batches else len(epoch)
    return BucketPlan(
        bucket=number,
        edge_tokens=edge,
        samples=int(epoch.size[mine].sum(dtype=np.int64)),
        tokens=int(tokens[mine].sum()),
        batches=batches,
        padded_tokens=own_padded,
        efficiency=int(tokens[mine].sum()) / own_padded if batches else 1.0,
        batch_share=batches / len(epoch),
        longest_run=int(own_runs.max(initial=0)),
        last_strides=(len(epoch) - 1 - last) * batches / len(epoch) if batches else 0.0,
    )


def _histogram(lengths: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Bins that grow by a constant factor: lengths spread over two decades."""
    shortest, longest = int(lengths.min()), int(lengths.max())
    bins = np.geomspace(shortest, max(longest, shortest + 1), HISTOGRAM_BINS + 1)
    bins[0], bins[-1] = shortest, max(longest, shortest + 1)  # free of rounding, or the extremes fall out
    return bins, np.histogram(lengths, bins)[0]


def _mix(buckets: NDArray[Any], count: int) -> tuple[tuple[float, ...], ...]:
    windows = min(MIX_WINDOWS, len(buckets))
    cells = np.arange(len(buckets)) * windows // len(buckets) * count + buckets
    counts = np.bincount(cells, minlength=windows * count).reshape(windows, count)
    shares = counts / counts.sum(axis=1, keepdims=True)
    return tuple(tuple(row) for row in shares.tolist())
