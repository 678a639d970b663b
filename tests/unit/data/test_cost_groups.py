"""Batches of equal cost side by side, and what that spares ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_toys import DEMO, demo_lengths, plan_of

from dflash.data.cost_groups import WINDOW_GROUPS, group_by_cost
from dflash.train.schedule import waiting_frac
from tests.support.plans import positions_of_epoch


@settings(max_examples=200, deadline=None, derandomize=True)
@given(costs=st.lists(st.integers(1, 40), max_size=200), size=st.integers(1, 5), first=st.integers(0, 30))
def test_grouping_is_a_permutation_inside_aligned_windows_and_groups_are_the_cheapest_first(
    costs: list[int], size: int, first: int
) -> None:
    order = group_by_cost(np.array(costs, dtype=np.int64), size=size, first=first).tolist()
    assert sorted(order) == list(range(len(costs)))
    if size == 1:
        assert order == sorted(order)
    begin = -first % size
    usable = max(0, len(costs) - begin) // size * size
    assert order[:begin] == list(range(len(costs)))[:begin]
    assert order[begin + usable :] == list(range(len(costs)))[begin + usable :]
    window = WINDOW_GROUPS * size
    for start in range(begin, begin + usable, window):
        end = min(start + window, begin + usable)
        groups = [order[place : place + size] for place in range(start, end, size)]
        # The simple way: sorted by cost (earlier first), cut, groups by their first member, members in order.
        wanted = sorted(range(start, end), key=lambda place: (costs[place], place))
        cut = [sorted(wanted[place : place + size]) for place in range(0, end - start, size)]
        assert groups == sorted(cut)


@pytest.mark.parametrize("order", ["interleave", "random"])
def test_a_grouped_plan_holds_the_same_batches_and_spares_ranks_their_waiting(order: str) -> None:
    ranks, epochs = 4, 2
    plain = DEMO.model_copy(update={"max_sequences": 7, "order": order})
    grouped = plain.model_copy(update={"equal_cost_neighbours": ranks})
    plans = [plan_of(demo_lengths(12_000), plan=one, epochs=epochs) for one in (plain, grouped)]
    for epoch in range(epochs):
        rows = [sorted(plan[position].rows for position in positions_of_epoch(plan, epoch)) for plan in plans]
        assert rows[0] == rows[1]
    costs = [np.concatenate([arrays.padded_tokens for arrays in plan.epochs]).tolist() for plan in plans]
    waiting = [
        waiting_frac((found[start : start + ranks] for start in range(0, len(found), ranks)), ranks=ranks) for found in costs
    ]
    assert waiting[1] < 0.02 < waiting[0]
    assert plans[1].manifest.bucket_run_limit == 0
    assert plans[0].manifest.plan_sha256 != plans[1].manifest.plan_sha256


def test_waiting_is_the_time_behind_the_dearest_rank() -> None:
    assert waiting_frac([[4, 4], [2, 6]], ranks=2) == pytest.approx(1 - 16 / 20)
    assert waiting_frac([[1, 3, 3, 1]], ranks=2) == 0
    assert waiting_frac([[5]], ranks=3) == pytest.approx(2 / 3)
    assert waiting_frac([], ranks=2) == 0
