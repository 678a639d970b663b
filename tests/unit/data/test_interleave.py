"""The order of buckets: exact feasibility against exhaustive search, and proportion kept at any mix."""

from __future__ import annotations

from functools import cache
from itertools import groupby, product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflash.data.interleave import interleave_buckets, longest_run, shortest_feasible_run


def orders(counts: tuple[int, ...], *, max_run: int, epochs: int, seed: int = 0) -> list[list[int]]:
    rngs = [np.random.default_rng((seed, epoch)) for epoch in range(epochs)]
    return [order.tolist() for order in interleave_buckets(counts, max_run=max_run, epochs=epochs, rngs=rngs)]


def run_of(sequence: list[int]) -> int:
    return max((len(list(run)) for _, run in groupby(sequence)), default=0)


def exists(counts: tuple[int, ...], *, limit: int, epochs: int) -> bool:
    """Exhaustive search over all orders of all epochs (memoised on what the future depends on)."""

    @cache
    def search(rest: tuple[int, ...], epochs_left: int, last: int, run: int) -> bool:
        if sum(rest) == 0:
            return epochs_left == 0 or search(counts, epochs_left - 1, last, run)
        for bucket, count in enumerate(rest):
            after = run + 1 if bucket == last else 1
            if count and after <= limit:
                left = tuple(c - (k == bucket) for k, c in enumerate(rest))
                if search(left, epochs_left, bucket, after):
                    return True
        return False

    return search(counts, epochs - 1, -1, 0)


TINY = [c for c in product(range(6), repeat=3) if sum(c) and list(c) == sorted(c, reverse=True)]


@pytest.mark.parametrize("epochs", [1, 2, 3, 5])
def test_the_shortest_feasible_run_is_the_one_that_exhaustive_search_finds(epochs: int) -> None:
    for counts in TINY:
        shortest = shortest_feasible_run(counts, epochs=epochs)
        assert exists(counts, limit=shortest, epochs=epochs), counts
        assert shortest == 1 or not exists(counts, limit=shortest - 1, epochs=epochs), counts


@pytest.mark.parametrize("max_run", [1, 2, 3])
def test_one_epoch_is_feasible_iff_the_biggest_fits_between_the_others(max_run: int) -> None:
    for counts in TINY:
        feasible = max(counts) <= max_run * (sum(counts) - max(counts) + 1)
        assert exists(counts, limit=max_run, epochs=1) == feasible
        assert (shortest_feasible_run(counts, epochs=1) <= max_run) == feasible


@pytest.mark.parametrize("epochs", [1, 2, 4])
@pytest.mark.parametrize("max_run", [1, 2, 3])
def test_every_tiny_mix_keeps_the_shortest_run_it_can_across_epochs(epochs: int, max_run: int) -> None:
    for counts in TINY:
        for seed in range(3):
            whole = [bucket for order in orders(counts, max_run=max_run, epochs=epochs, seed=seed) for bucket in order]
            assert run_of(whole) <= max(max_run, shortest_feasible_run(counts, epochs=epochs)), (counts, whole)


COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(sum).map(tuple)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(counts=COUNTS, max_run=st.integers(1, 4), epochs=st.integers(1, 5), seed=st.integers(0, 3))
@example(counts=(40, 13), max_run=3, epochs=1, seed=0)  # exactly 3 * (13 + 1) - 2
@example(counts=(42, 13), max_run=3, epochs=1, seed=0)  # exactly feasible for one epoch ...
@example(counts=(42, 13), max_run=3, epochs=2, seed=0)  # ... and not for two
@example(counts=(39, 13), max_run=3, epochs=5, seed=0)  # exactly feasible for any number of epochs
@example(counts=(40, 13), max_run=3, epochs=3, seed=0)  # feasible for three epochs, with nothing to spare
def test_each_epoch_holds_its_batches_and_no_run_is_longer_than_it_must_be(
    counts: tuple[int, ...], max_run: int, epochs: int, seed: int
) -> None:
    result = orders(counts, max_run=max_run, epochs=epochs, seed=seed)
    assert len(result) == epochs
    for order in result:
        assert tuple(order.count(bucket) for bucket in range(len(counts))) == counts
    whole = [bucket for order in result for bucket in order]
    assert run_of(whole) <= max(max_run, shortest_feasible_run(counts, epochs=epochs))


def test_three_thousand_feasible_mixes_never_break_the_limit() -> None:
    rng = np.random.default_rng(5)
    checked = 0
    while checked < 3000:
        counts = tuple(rng.multinomial(60, rng.dirichlet([0.6] * 6)).tolist())
        if shortest_feasible_run(counts, epochs=2) > 3:
            continue
        whole = [bucket for order in orders(counts, max_run=3, epochs=2, seed=checked) for bucket in order]
        assert run_of(whole) <= 3, counts
        checked += 1


def test_the_mix_is_proportional_all_along_the_epoch() -> None:
    counts = (400, 250, 150, 100, 60, 40)
    [order] = orders(counts, max_run=3, epochs=1)
    for bucket, count in enumerate(counts):
        seen = np.cumsum([chosen == bucket for chosen in order])
        wanted = count * np.arange(1, len(order) + 1) / len(order)
        assert np.abs(seen - wanted).max() < 6, f"bucket {bucket} runs ahead or falls behind"
        last = max(place for place, chosen in enumerate(order) if chosen == bucket)
        assert last >= len(order) - 2.5 * len(order) / count, "every bucket lasts to the end"


def test_epochs_and_seeds_differ_and_repeat() -> None:
    counts = (9, 7, 5, 3)
    first = orders(counts, max_run=3, epochs=3, seed=1)
    assert first == orders(counts, max_run=3, epochs=3, seed=1)
    assert first[0] != first[1] != first[2]
    assert first[0] != orders(counts, max_run=3, epochs=3, seed=2)[0]


def test_a_mix_of_one_bucket_is_one_run() -> None:
    assert orders((4,), max_run=3, epochs=2) == [[0] * 4, [0] * 4]
    assert shortest_feasible_run((4,), epochs=2) == 8


@settings(max_examples=60, deadline=None, derandomize=True)
@given(values=st.lists(st.integers(0, 2), max_size=12))
def test_the_longest_run_is_counted(values: list[int]) -> None:
    assert longest_run(np.array(values, dtype=np.int64)) == run_of(values)
