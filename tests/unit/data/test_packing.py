"""Packing one bucket: every sample once, inside the budget, with little padding."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data.packing import PackedBucket, pack_bucket


def packed(padded: list[int], *, budget: int, max_sequences: int = 64, seed: int = 0) -> PackedBucket:
    rng = np.random.default_rng(seed)
    return pack_bucket(np.array(padded, dtype=np.int64), tokens_per_batch=budget, max_sequences=max_sequences, rng=rng)


def batches(result: PackedBucket) -> list[list[int]]:
    return [result.order[a:b].tolist() for a, b in zip(result.starts[:-1], result.starts[1:], strict=True)]


LENGTHS = st.lists(st.integers(1, 12).map(lambda n: n * 8), max_size=120)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(padded=LENGTHS, budget=st.integers(96, 400), max_sequences=st.integers(1, 20), seed=st.integers(0, 3))
def test_every_sample_is_in_one_batch_and_every_batch_within_its_limits(
    padded: list[int], budget: int, max_sequences: int, seed: int
) -> None:
    result = packed(padded, budget=budget, max_sequences=max_sequences, seed=seed)
    members = batches(result)
    assert sorted(row for batch in members for row in batch) == list(range(len(padded)))
    for batch, length in zip(members, result.padded_length.tolist(), strict=True):
        assert 1 <= len(batch) <= max_sequences
        assert length == max(padded[row] for row in batch)
        assert length * len(batch) <= budget


@settings(max_examples=200, deadline=None, derandomize=True)
@given(padded=LENGTHS.filter(bool), budget=st.integers(96, 400))
def test_no_two_neighbouring_batches_could_have_been_one(padded: list[int], budget: int) -> None:
    members = batches(packed(padded, budget=budget))
    for first, second in pairwise(members):
        together = [padded[row] for row in (*first, *second)]
        assert max(together) * len(together) > budget


def test_samples_of_one_length_waste_nothing() -> None:
    result = packed([32] * 100, budget=1024)
    assert [len(batch) for batch in batches(result)] == [32, 32, 18, 18], "and the last batches share what is left"


def test_a_tiny_last_batch_is_filled_from_the_one_before() -> None:
    sizes = [len(batch) for batch in batches(packed([8] * 11, budget=80))]
    assert sizes == [6, 5]


def test_a_longer_last_batch_takes_only_what_fits() -> None:
    result = packed([8] * 10 + [40], budget=80)
    assert [len(batch) for batch in batches(result)] == [9, 2]
    assert result.padded_length.tolist() == [8, 40]


def test_who_meets_whom_is_drawn_anew() -> None:
    first, again, other = (batches(packed([16] * 64, budget=256, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in other}


def test_no_samples_make_no_batch() -> None:
    assert batches(packed([], budget=64)) == []


@pytest.mark.parametrize("length", [8, 64])
def test_a_sample_as_long_as_the_budget_is_alone(length: int) -> None:
    assert [len(batch) for batch in batches(packed([length] * 3, budget=length))] == [1, 1, 1]
