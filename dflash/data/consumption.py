"""Consumption of a plan: which positions are left, where skipping makes long runs, which batch goes to which rank; pure.

Invariant: nothing here is set up in time proportional to the plan, so a resume at any position costs the same.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import overload

import numpy as np

from dflash.data.plan_arrays import BatchPlan

WINDOW_STEPS = 32
"""Steps whose batches are dealt to the ranks together: the wider, the more equal; the narrower, the closer to the plan's order."""


@dataclass(frozen=True, slots=True, eq=False)
class PositionsLeft(Sequence[int]):
    """The integers of [start, stop) in order, without some; element access is O(log skipped).

    Attributes:
        skipped: ascending, distinct, all in [start, stop).
    """

    start: int
    stop: int
    skipped: tuple[int, ...]

    def __len__(self) -> int:
        return max(0, self.stop - self.start) - len(self.skipped)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        """One position, or a stretch of them (slices have no step)."""
        if isinstance(index, slice):
            first, last, step = index.indices(len(self))
            if step != 1:
                raise ValueError("positions are consumed one after another: a slice of them has no step")
            return self._between(first, max(first, last))
        index += len(self) if index < 0 else 0
        if not 0 <= index < len(self):
            raise IndexError(f"{len(self)} positions are left, there is no number {index}")
        return self._position(index)

    def __iter__(self) -> Iterator[int]:
        begin = self.start
        for skipped in self.skipped:
            yield from range(begin, skipped)
            begin = skipped + 1
        yield from range(begin, self.stop)

    def _position(self, index: int) -> int:
        """`skipped[k] - start - k` positions come before the k-th skipped one."""
        passed = bisect_right(range(len(self.skipped)), index, key=lambda k: self.skipped[k] - self.start - k)
        return self.start + index + passed

    def _between(self, first: int, last: int) -> PositionsLeft:
        if first >= last:
            return PositionsLeft(self.start, self.start, ())
        begin, end = self._position(first), self._position(last - 1) + 1
        return PositionsLeft(begin, end, self.skipped[bisect_left(self.skipped, begin) : bisect_left(self.skipped, end)])


def positions_to_consume(batches: int, *, start: int, skipped: Collection[int]) -> PositionsLeft:
    """Plan positions from `start` on, in order, without the skipped ones.

    Args:
        batches: positions of the plan.
        start: first position that may be consumed.
        skipped: positions to leave out; those outside the rest are ignored.
    """
    return PositionsLeft(start, max(start, batches), tuple(sorted(p for p in set(skipped) if start <= p < batches)))


@dataclass(frozen=True, slots=True)
class RunJoin:
    """Two runs of one bucket that skipped positions join into one that is longer than the plan's limit.

    Attributes:
        first, last: positions of its ends.
        batches: length of the joined run.
    """

    bucket: int
    first: int
    last: int
    batches: int


def run_joins(plan: BatchPlan, skipped: Collection[int]) -> tuple[RunJoin, ...]:
    """Where skipping joins runs of one bucket beyond `max_bucket_run`; they are declared, the order stays.

    Args:
        plan: the plan.
        skipped: positions that are left out.

    Returns:
        Each such run once, in order. Runs that the plan has by itself are not among them.
    """
    without = set(skipped)
    limit = int(plan.manifest.settings["max_bucket_run"])
    joins: list[RunJoin] = []
    for position in sorted(p for p in without if 0 <= p < len(plan)):
        if position == 0 or position - 1 in without or (joins and position <= joins[-1].last):
            continue  # only the first of neighbouring skips, and no run twice
        bucket = plan.bucket_of(position - 1)
        right = next((p for p in range(position + 1, len(plan)) if p not in without), None)
        if right is None or plan.bucket_of(right) != bucket:
            continue
        before = _run(plan, range(position - 1, -1, -1), bucket, without)
        after = _run(plan, range(right, len(plan)), bucket, without)
        parted = any(plan.bucket_of(p) != bucket for p in range(before[-1], after[-1]) if p in without)
        if parted and len(before) + len(after) > limit:
            joins.append(RunJoin(bucket, before[-1], after[-1], len(before) + len(after)))
    return tuple(joins)


def _run(plan: BatchPlan, positions: range, bucket: int, without: set[int]) -> list[int]:
    run: list[int] = []
    for position in positions:
        if position in without:
            continue
        if plan.bucket_of(position) != bucket:
            break
        run.append(position)
    return run


class RankedSteps:
    """A plan dealt to R data-parallel ranks: at every step each rank has one batch, all of nearly equal cost.

    `WINDOW_STEPS` steps are dealt together: their batches, sorted by padded tokens, are cut into groups of R neighbours, one group
    a step, in the order of the plan; inside a group the rank that has had least so far gets the most. So every batch of an epoch
    is consumed once, less than `WINDOW_STEPS` steps from its place, and all ranks have the same number of steps. What R does not
    divide is left over at each epoch's end and declared.

    Args:
        plan: the plan.
        ranks: R, at least 1.
        skipped: positions to leave out.

    Attributes:
        left_over: positions that no rank gets, fewer than R an epoch.
    """

    def __init__(self, plan: BatchPlan, *, ranks: int, skipped: Collection[int]) -> None:
        self._plan = plan
        self._ranks = ranks
        epochs = [plan.positions_of_epoch(epoch) for epoch in range(len(plan.epochs))]
        self._epochs = [positions_to_consume(places.stop, start=places.start, skipped=skipped) for places in epochs]
        self._firsts = np.cumsum([0, *(len(positions) // ranks for positions in self._epochs)])
        self.left_over = tuple(p for positions in self._epochs for p in positions[len(positions) // ranks * ranks :])
        self._deal = lru_cache(maxsize=2)(self._deal_window)

    def __len__(self) -> int:
        """Steps of every rank."""
        return int(self._firsts[-1])

    def __getitem__(self, step: int) -> tuple[int, ...]:
        """[R] the position that each rank has at a step."""
        if not 0 <= step < len(self):
            raise IndexError(f"there are {len(self)} steps, not {step}")
        epoch = int(np.searchsorted(self._firsts, step, side="right")) - 1
        window, inside = divmod(step - int(self._firsts[epoch]), WINDOW_STEPS)
        return self._deal(epoch, window)[inside]

    def of_rank(self, rank: int, *, start_step: int) -> Iterator[int]:
        """The positions of one rank, from a step on."""
        return (self[step][rank] for step in range(start_step, len(self)))

    def _deal_window(self, epoch: int, window: int) -> list[tuple[int, ...]]:
        ranks, size = self._ranks, WINDOW_STEPS * self._ranks
        usable = len(self._epochs[epoch]) // ranks * ranks
        positions = np.array(self._epochs[epoch][window * size : min((window + 1) * size, usable)])
        costs = self._plan.padded_tokens_of(positions, epoch=epoch)
        order = np.argsort(costs, kind="stable")
        groups, group_costs = positions[order].reshape(-1, ranks), costs[order].reshape(-1, ranks)
        had = np.zeros(ranks, np.int64)
        # The same rank must not be first in every window: ties go by a rank that moves on.
        turn = (np.arange(ranks) + window) % ranks
        dealt = []
        for group in np.argsort(groups.min(axis=1)):
            richest_first = turn[np.argsort(-had[turn], kind="stable")]
            had[richest_first] += group_costs[group]
            step = np.empty(ranks, np.int64)
            step[richest_first] = groups[group]
            dealt.append(tuple(step.tolist()))
        return dealt


def rank_positions(plan: BatchPlan, *, rank: int, ranks: int, skipped: Collection[int]) -> Iterator[int]:
    """The positions that one of R ranks consumes, in order; see `RankedSteps`."""
    return RankedSteps(plan, ranks=ranks, skipped=skipped).of_rank(rank, start_step=0)
