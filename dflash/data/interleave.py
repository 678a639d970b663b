"""The order of buckets in consumption: proportional, random, and never more than a given run of one bucket; pure.

Batch j of a bucket with c batches wants the place (j + u) / c of its epoch, u drawn anew for every batch and epoch;
the earliest wish is granted, unless that would make a longer run than allowed, now or unavoidably later.

Feasibility, exactly: let the most frequent bucket have c batches an epoch and all others o together. Runs of at most R exist
over E epochs if and only if E * (c - R * o) <= R: the others make E*o gaps' borders, hence E*o + 1 gaps of R. For one epoch
that is c <= R * (o + 1). Where it fails, the smallest R that is feasible takes its place.
Sufficiency is what the guard below keeps: before every choice each bucket's rest still fits into the gaps that are left,
counting the room that the following epochs need at this epoch's end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def shortest_feasible_run(counts: Sequence[int], *, epochs: int) -> int:
    """The smallest R such that some order over all epochs has no run of one bucket longer than R.

    Args:
        counts: batches of each bucket in one epoch.
        epochs: epochs consumed one after another, each with these counts.
    """
    most = max(counts, default=0)
    others = sum(counts) - most
    return max(1, -(-epochs * most // (epochs * others + 1)))


def longest_run(buckets: NDArray[np.int64]) -> int:
    """Length of the longest run of equal values; 0 for an empty order."""
    if len(buckets) == 0:
        return 0
    changes = np.flatnonzero(buckets[1:] != buckets[:-1]) + 1
    return int(np.diff(np.concatenate([[0], changes, [len(buckets)]])).max())


def interleave_buckets(
    counts: Sequence[int], *, max_run: int, epochs: int, rngs: Sequence[np.random.Generator]
) -> list[NDArray[np.int64]]:
    """Order the buckets of every epoch.

    Args:
        counts: batches of each bucket in one epoch.
        max_run: longest run wanted; replaced by the shortest feasible one where it is not feasible.
        epochs: number of epochs.
        rngs: one generator an epoch.

    Returns:
        For each epoch [sum(counts)] bucket numbers; no run is longer than allowed, also across epochs.
    """
    limit = max(max_run, shortest_feasible_run(counts, epochs=epochs))
    guard = _RunGuard(counts, limit)
    orders = []
    for epoch in range(epochs):
        wishes = [((np.arange(count) + rngs[epoch].random(count)) / max(count, 1)).tolist() for count in counts]
        orders.append(np.array(guard.order(wishes, epochs_after=epochs - epoch - 1), dtype=np.int64))
    return orders


class _RunGuard:
    """Grants wishes in order under the run limit; `last` and `run` live on from epoch to epoch."""

    def __init__(self, counts: Sequence[int], limit: int) -> None:
        self._counts = counts
        self._limit = limit
        self._last = -1
        self._run = 0

    def order(self, wishes: Sequence[Sequence[float]], *, epochs_after: int) -> list[int]:
        """One epoch's buckets in order; `wishes[k]` are the ascending places that bucket k's batches want."""
        total = sum(self._counts)
        tail_room = [self._tail_room(count, total - count, epochs_after) for count in self._counts]
        rest = list(self._counts)
        heads = [places[0] if places else np.inf for places in wishes]
        result: list[int] = []
        for left in range(total, 0, -1):
            chosen = self._forced(rest, left, tail_room)
            if chosen is None:
                chosen = self._earliest(heads)
            self._run = self._run + 1 if chosen == self._last else 1
            self._last = chosen
            rest[chosen] -= 1
            taken = self._counts[chosen] - rest[chosen]
            heads[chosen] = wishes[chosen][taken] if rest[chosen] else np.inf
            result.append(chosen)
        return result

    def _tail_room(self, count: int, others: int, epochs_after: int) -> int:
        """Longest run of a bucket at this epoch's end that leaves the later epochs the room they need."""
        needed_at_next_head = max(0, epochs_after * (count - self._limit * others))
        return self._limit - needed_at_next_head

    def _forced(self, rest: Sequence[int], left: int, tail_room: Sequence[int]) -> int | None:
        """The bucket whose rest would no longer fit into the remaining gaps if another were taken now."""
        most = max(rest)
        if most <= self._limit * (left - most - 1):  # fits behind the next other batch, whatever the tail: nothing presses
            return None
        for bucket, count in enumerate(rest):
            others = left - count
            if others and count > self._limit * (others - 1) + tail_room[bucket]:
                return bucket
        return None

    def _earliest(self, heads: Sequence[float]) -> int:
        """The bucket with the earliest wish among those that may follow."""
        best = min(range(len(heads)), key=heads.__getitem__)
        if best == self._last and self._run >= self._limit:
            best = min((k for k in range(len(heads)) if k != self._last), key=heads.__getitem__)
        return best
