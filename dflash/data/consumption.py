"""Consumption of a plan: which positions are left, where skipping makes long runs; pure.

Invariant: nothing here is set up in time proportional to the plan, so a resume at any position costs the same.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from dflash.data.plan_arrays import BatchPlan


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
