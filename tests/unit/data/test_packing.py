"""Packing one bucket: every sample once, inside the budget, with little padding; the same as a greedy that takes one at a time."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import PlanConfig
from dflash.data.buckets import count_lengths
from dflash.data.packing import (
    LANE_SAMPLES,
    PaddedLengths,
    count_rungs,
    pack_in_order,
    pack_sorted,
    padded_lengths,
    sort_windows,
)
from dflash.errors import DataError


def plan_of(*, budget: int, max_sequences: int = 64, multiple: int = 8, ladder: int | None = None) -> PlanConfig:
    return PlanConfig(tokens_per_batch=budget, max_sequences=max_sequences, pad_multiple_tokens=multiple, max_padded_lengths=ladder)


def packed(lengths: list[int], plan: PlanConfig, *, window: int | None = None) -> tuple[list[list[int]], list[int]]:
    """Batches of real lengths, and their padded lengths; windows are taken in the order given."""
    values = np.array(lengths)
    ladder = padded_lengths(count_lengths(values, longest=None), plan=plan)
    rungs = ladder.rung_of_length[values]
    width = window or len(values)
    order = sort_windows(rungs, window=width)
    counts = count_rungs(rungs, window=width, distinct=len(ladder.tokens))
    result = pack_sorted(counts, ladder.capacity(plan))
    return cut(values[order].tolist(), result.size.tolist()), ladder.tokens[result.rung].tolist()


def cut(rows: list[int], sizes: list[int]) -> list[list[int]]:
    ends = np.cumsum(sizes).tolist()
    return [rows[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def naive(lengths: list[int], plan: PlanConfig) -> list[int]:
    """Sizes of the batches when samples are taken one at a time from the shortest on; without sharing the last two."""
    sizes, count = [], 0
    for length in sorted(lengths):
        room = min(plan.tokens_per_batch // (-(-length // plan.pad_multiple_tokens) * plan.pad_multiple_tokens), plan.max_sequences)
        if count + 1 > room:
            sizes.append(count)
            count = 0
        count += 1
    return [*sizes, count]


LENGTHS = st.lists(st.integers(1, 96), min_size=1, max_size=120)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    lengths=LENGTHS,
    budget=st.integers(96, 400),
    max_sequences=st.integers(1, 20),
    window=st.none() | st.integers(1, 50),
    ladder=st.none() | st.integers(1, 5),
)
def test_every_sample_is_in_one_batch_and_every_batch_within_its_limits(
    lengths: list[int], budget: int, max_sequences: int, window: int | None, ladder: int | None
) -> None:
    batches, padded = packed(lengths, plan_of(budget=budget, max_sequences=max_sequences, ladder=ladder), window=window)
    assert sorted(length for batch in batches for length in batch) == sorted(lengths)
    for batch, width in zip(batches, padded, strict=True):
        assert 1 <= len(batch) <= max_sequences
        assert max(batch) <= width
        assert width * len(batch) <= budget
        assert width % 8 == 0
        if ladder is None:
            assert width - max(batch) < 8
    if ladder is not None:
        assert len(set(padded)) <= ladder


@settings(max_examples=200, deadline=None, derandomize=True)
@given(lengths=LENGTHS, budget=st.integers(96, 400), max_sequences=st.integers(1, 20), window=st.none() | st.integers(1, 50))
def test_the_batches_are_those_of_a_greedy_that_takes_one_sample_at_a_time(
    lengths: list[int], budget: int, max_sequences: int, window: int | None
) -> None:
    plan = plan_of(budget=budget, max_sequences=max_sequences)
    batches, _ = packed(lengths, plan, window=window)
    width = window or len(lengths)
    wanted = [naive(lengths[start : start + width], plan) for start in range(0, len(lengths), width)]
    found = [len(batch) for batch in batches]
    for sizes in wanted:
        mine, found = found[: len(sizes)], found[len(sizes) :]
        assert mine[:-2] == sizes[:-2]
        assert sum(mine) == sum(sizes)
        assert mine[-1] >= sizes[-1]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(lengths=LENGTHS, budget=st.integers(96, 400))
def test_no_two_neighbouring_batches_could_have_been_one(lengths: list[int], budget: int) -> None:
    batches, padded = packed(lengths, plan_of(budget=budget))
    for (first, second), (one, other) in zip(pairwise(batches), pairwise(padded), strict=True):
        assert max(one, other) * (len(first) + len(second)) > budget


def test_samples_of_one_length_waste_nothing() -> None:
    batches, _ = packed([32] * 100, plan_of(budget=1024))
    assert [len(batch) for batch in batches] == [32, 32, 18, 18], "and the last batches share what is left"


def test_a_longer_last_batch_takes_only_what_fits() -> None:
    batches, padded = packed([8] * 10 + [40], plan_of(budget=80))
    assert [len(batch) for batch in batches] == [9, 2]
    assert padded == [8, 40]


@pytest.mark.parametrize("length", [8, 64])
def test_a_sample_as_long_as_the_budget_is_alone(length: int) -> None:
    batches, _ = packed([length] * 3, plan_of(budget=length))
    assert [len(batch) for batch in batches] == [1, 1, 1]


def test_a_window_is_sorted_in_place() -> None:
    rungs = np.array([3, 1, 2, 9, 0, 4, 7, 7, 1], np.uint8)
    assert sort_windows(rungs, window=4).tolist() == [1, 2, 0, 3, 4, 5, 6, 7, 8]
    assert count_rungs(rungs[:5], window=4, distinct=10).tolist() == [[0, 1, 1, 1, 0, 0, 0, 0, 0, 1], [1] + [0] * 9]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40), ladder=st.integers(1, 4))
def test_no_other_ladder_pads_less(lengths: list[int], ladder: int) -> None:
    counts = count_lengths(np.array(lengths), longest=None)
    rungs = padded_lengths(counts, plan=plan_of(budget=64, multiple=4, ladder=ladder))
    assert len(rungs.tokens) <= ladder

    def total(chosen: list[int]) -> int:
        return sum(min(width for width in chosen if width >= length) for length in lengths)

    every = sorted({-(-length // 4) * 4 for length in lengths})
    ways = (way for size in range(ladder) for way in combinations(every[:-1], size))
    mine = [int(rungs.tokens[rungs.rung_of_length[length]]) for length in lengths]
    assert sum(mine) == min(total([*way, every[-1]]) for way in ways)


def test_a_ladder_of_many_rungs_is_just_the_multiples() -> None:
    counts = count_lengths(np.array([3, 9, 17, 60]), longest=None)
    assert padded_lengths(counts, plan=plan_of(budget=64, ladder=9)).tokens.tolist() == [8, 16, 24, 64]


def test_a_sample_beyond_the_budget_is_named() -> None:
    with pytest.raises(DataError, match=r"61 tokens, padded to 64, exceeds plan\.tokens_per_batch 63"):
        padded_lengths(count_lengths(np.array([61]), longest=None), plan=plan_of(budget=63))


def in_order(rungs: np.ndarray, plan: PlanConfig, tokens: list[int]) -> tuple[list[int], list[int]]:
    ladder = PaddedLengths(np.array(tokens), np.arange(len(tokens)))
    result = pack_in_order(rungs, ladder, plan=plan)
    return result.size.tolist(), result.rung.tolist()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(rungs=st.lists(st.integers(0, 3), min_size=1, max_size=60), budget=st.integers(40, 200), max_sequences=st.integers(1, 9))
def test_packing_in_order_closes_a_batch_only_when_the_next_sample_does_not_fit(
    rungs: list[int], budget: int, max_sequences: int
) -> None:
    tokens = [8, 16, 24, 40]
    sizes, longest = in_order(np.array(rungs, np.uint8), plan_of(budget=budget, max_sequences=max_sequences), tokens)
    batches = cut(rungs, sizes)
    assert [row for batch in batches for row in batch] == rungs
    assert longest == [max(batch) for batch in batches]
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        assert len(batch) <= max_sequences
        assert tokens[max(batch)] * len(batch) <= budget
        if following is not None:
            more = [*batch, following[0]]
            assert len(more) > max_sequences or tokens[max(more)] * len(more) > budget


def test_many_samples_are_packed_in_lanes() -> None:
    rungs = np.random.default_rng(0).integers(0, 4, 3 * LANE_SAMPLES + 17).astype(np.uint8)
    sizes, longest = in_order(rungs, plan_of(budget=400), [8, 16, 24, 40])
    assert sum(sizes) == len(rungs)
    assert longest == [max(batch) for batch in cut(rungs.tolist(), sizes)]
    assert all([8, 16, 24, 40][rung] * size <= 400 for rung, size in zip(longest, sizes, strict=True))
