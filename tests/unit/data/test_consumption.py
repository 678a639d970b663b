"""Which positions are left, and what skipping joins."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_toys import plan_of_orders

from dflash.data.consumption import RunJoin, positions_to_consume, run_joins


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    batches=st.integers(0, 60),
    start=st.integers(0, 65),
    skipped=st.sets(st.integers(-3, 70), max_size=25),
    cut=st.tuples(st.integers(-5, 70), st.integers(-5, 70)),
)
def test_positions_left_are_a_list_that_is_never_made(batches: int, start: int, skipped: set[int], cut: tuple[int, int]) -> None:
    wanted = [position for position in range(start, batches) if position not in skipped]
    left = positions_to_consume(batches, start=start, skipped=skipped)
    assert len(left) == len(wanted)
    assert list(left) == wanted
    assert [left[index] for index in range(len(left))] == wanted
    assert [left[-index - 1] for index in range(len(left))] == wanted[::-1]
    first, last = cut
    assert list(left[first:last]) == wanted[first:last]
    assert list(left[first:last][1:]) == wanted[first:last][1:]
    with pytest.raises(IndexError):
        left[len(wanted)]


def test_a_resume_deep_in_a_huge_plan_is_immediate() -> None:
    left = positions_to_consume(10**15, start=10**14, skipped={5, 10**14, 10**14 + 3})
    assert list(islice(left, 3)) == [10**14 + 1, 10**14 + 2, 10**14 + 4]
    assert left[10**14] == 2 * 10**14 + 2
    assert len(left) == 9 * 10**14 - 2
    with pytest.raises(ValueError, match="no step"):
        left[::2]


def naive_joins(orders: Sequence[Sequence[int]], skipped: set[int], limit: int) -> list[tuple[int, int, int, int]]:
    """Runs of what is left that are too long and are made of batches that were parted by another bucket."""
    buckets = [bucket for order in orders for bucket in order]
    left = [position for position in range(len(buckets)) if position not in skipped]
    found = []
    for bucket, group in groupby(left, key=lambda position: buckets[position]):
        run = list(group)
        parted = any(buckets[position] != bucket for position in range(run[0], run[-1]))
        if parted and len(run) > limit:
            found.append((bucket, run[0], run[-1], len(run)))
    return found


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    orders=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=2),
    skipped=st.sets(st.integers(0, 30), max_size=10),
    limit=st.integers(1, 3),
)
def test_every_join_of_runs_is_declared(orders: list[list[int]], skipped: set[int], limit: int) -> None:
    joins = run_joins(plan_of_orders(*orders, max_bucket_run=limit), skipped)
    assert [(join.bucket, join.first, join.last, join.batches) for join in joins] == naive_joins(orders, skipped, limit)


def test_a_join_across_epochs_is_declared_and_the_plans_own_runs_are_not() -> None:
    plan = plan_of_orders([1, 0, 0, 1], [0, 0, 1, 1, 1, 1, 1], max_bucket_run=3)
    assert run_joins(plan, {3}) == (RunJoin(bucket=0, first=1, last=5, batches=4),)
    assert run_joins(plan, {8}) == ()
    assert run_joins(plan, set()) == ()
