"""The order of buckets in consumption: proportional, random, and never more than a given run of one bucket; pure.

Hierarchical merge, vectorised: beginning with the rarest bucket, each more frequent one is spread over the order made so far. With
c batches over g places between the others, batch j goes before place floor((j + u) g / c), u in [0, 1): every bucket keeps its
share of any stretch. Independent u make gaps of at most ceil(c/g) + 1 batches, one common u of at most ceil(c/g); the first is
used where the run limit leaves room for it. The order is a circle: it is cut at a random place of those where every bucket
occurred within its last stride (total / its batches), so every bucket lasts to the end of the epoch.
A bucket that is more frequent than R times the rest of its level still gets runs of at most R (R >= 2): the next level has at
least as many batches and parts it. The result is verified, joins included; where it fails (R = 1, a feasible mix with nothing to
spare) an exact greedy, one batch at a time, takes its place.

Feasibility, exactly: let the most frequent bucket have c batches an epoch and all others o together. Runs of at most R exist
over E epochs if and only if E * (c - R * o) <= R: the others make E*o gaps' borders, hence E*o + 1 gaps of R. For one epoch
that is c <= R * (o + 1). Where it fails, the smallest R that is feasible takes its place.
Sufficiency is what the greedy's guard keeps: before every choice each bucket's rest still fits into the gaps that are left,
counting the room that the following epochs need at this epoch's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BucketArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How an order ends: its last bucket (-1: nothing came yet) and how often in a row."""

    bucket: int
    length: int


NOTHING_YET = RunEnd(-1, 0)


def shortest_feasible_run(counts: Sequence[int], *, epochs: int) -> int:
    """The smallest R such that some order over all epochs has no run of one bucket longer than R.

    Args:
        counts: batches of each bucket in one epoch.
        epochs: epochs consumed one after another, each with these counts.
    """
    most = max(counts, default=0)
    others = sum(counts) - most
    return max(1, -(-epochs * most // (epochs * others + 1)))


def run_lengths(buckets: NDArray[Any]) -> NDArray[np.int64]:
    """Length of every run of equal values, in order."""
    if len(buckets) == 0:
        return np.empty(0, np.int64)
    changes = np.flatnonzero(buckets[1:] != buckets[:-1]) + 1
    return np.diff(np.concatenate([[0], changes, [len(buckets)]]))


def longest_run(buckets: NDArray[Any], *, after: RunEnd) -> int:
    """Length of the longest run of equal values, the run that `after` ends with included."""
    runs = run_lengths(buckets)
    if not len(runs):
        return after.length
    joined = after.length if int(buckets[0]) == after.bucket else 0
    return max(after.length, joined + int(runs[0]), int(runs.max()))


def end_of(buckets: NDArray[Any], *, after: RunEnd) -> RunEnd:
    """The end of an order that follows `after`."""
    runs = run_lengths(buckets)
    if not len(runs):
        return after
    joined = after.length if len(runs) == 1 and int(buckets[0]) == after.bucket else 0
    return RunEnd(int(buckets[-1]), int(runs[-1]) + joined)


def interleave_epoch(
    counts: Sequence[int], *, limit: int, after: RunEnd, epochs_after: int, rng: np.random.Generator
) -> BucketArray:
    """Order the buckets of one epoch.

    Args:
        counts: batches of each bucket.
        limit: longest run allowed; see `shortest_feasible_run` for what can be kept.
        after: how the previous epoch ended.
        epochs_after: epochs that follow with the same counts.
        rng: of this epoch.

    Returns:
        [sum(counts)] bucket numbers; no run is longer than `limit`, the join with the previous epoch included, if
        `limit` is feasible over all epochs.
    """
    most = max(counts)
    # With nothing to spare the epoch's end must leave room for the next: the greedy counts it.
    spare = epochs_after == 0 or most <= limit * (sum(counts) - most)
    for jitter in (True, True, False, False) if spare else ():
        circle = _merge(counts, limit=limit, jitter=jitter, rng=rng)
        order = np.roll(circle, -_place_to_cut(circle, counts, after=after, rng=rng))
        if longest_run(order, after=after) <= limit:
            return order
    wishes = [((np.arange(count) + rng.random(count)) / max(count, 1)).tolist() for count in counts]
    guard = _RunGuard(counts, limit=limit, after=after)
    return np.array(guard.order(wishes, epochs_after=epochs_after), dtype=np.int32)


def _merge(counts: Sequence[int], *, limit: int, jitter: bool, rng: np.random.Generator) -> BucketArray:
    """Spread each bucket over all rarer ones; equally frequent ones in random order."""
    tie = rng.permutation(len(counts)).tolist()
    order = np.empty(0, np.int32)
    for bucket in sorted(range(len(counts)), key=lambda k: (counts[k], tie[k])):
        if counts[bucket]:
            order = _spread(order, bucket, counts[bucket], limit=limit, jitter=jitter, rng=rng)
    return order


def _spread(rest: BucketArray, bucket: int, count: int, *, limit: int, jitter: bool, rng: np.random.Generator) -> BucketArray:
    """`rest` with `count` batches of `bucket` before places of it, evenly."""
    gaps = len(rest)
    if gaps == 0:
        return np.full(count, bucket, np.int32)
    alike = not jitter or count > (limit - 1) * gaps
    offsets = np.full(count, rng.integers(gaps)) if alike else rng.integers(gaps, size=count)
    places = (np.arange(count) * gaps + offsets) // count + np.arange(count)
    order = np.empty(gaps + count, np.int32)
    others = np.ones(gaps + count, np.bool_)
    others[places] = False
    order[places] = bucket
    order[others] = rest
    return order


def _place_to_cut(circle: BucketArray, counts: Sequence[int], *, after: RunEnd, rng: np.random.Generator) -> int:
    """Where to begin: a random place before which every bucket occurred within its stride, or else the place nearest to that.

    It does not continue the previous epoch's last run, if another bucket can begin.
    """
    total = len(circle)
    worst = np.zeros(total, np.float32)  # batches since the last one of a bucket, in strides of it
    for bucket, count in enumerate(counts):
        if count:
            places = np.flatnonzero(circle == bucket)
            gaps = np.diff(np.append(places, places[0] + total))
            last = np.roll(np.repeat(places, gaps), places[0] + 1)
            since = (np.arange(total) - 1 - last) % total
            np.maximum(worst, since * count / total, out=worst, casting="same_kind")
    worst[circle == after.bucket] += total  # only where nothing else can begin
    good = np.flatnonzero(worst <= 1)
    return int(good[rng.integers(len(good))]) if len(good) else int(np.argmin(worst))


class _RunGuard:
    """Grants wishes in order, the earliest first, unless that would make a longer run than allowed, now or unavoidably later."""

    def __init__(self, counts: Sequence[int], *, limit: int, after: RunEnd) -> None:
        self._counts = counts
        self._limit = limit
        self._last = after.bucket
        self._run = after.length

    def order(self, wishes: Sequence[Sequence[float]], *, epochs_after: int) -> list[int]:
        """The epoch's buckets in order; `wishes[k]` are the ascending places that bucket k's batches want."""
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
            if count and others and count > self._limit * (others - 1) + tail_room[bucket]:
                return bucket
        return None

    def _earliest(self, heads: Sequence[float]) -> int:
        """The bucket with the earliest wish among those that may follow; the last one again where no other is left."""
        best = min(range(len(heads)), key=heads.__getitem__)
        if best == self._last and self._run >= self._limit:
            other = min((k for k in range(len(heads)) if k != self._last), key=heads.__getitem__, default=best)
            return best if heads[other] == np.inf else other
        return best
