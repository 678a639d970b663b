"""The order of buckets: exact feasibility against exhaustive search, the limit kept at any mix, proportion all along."""

from __future__ import annotations

from functools import cache
from itertools import groupby, product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflash.data import interleave
from dflash.data.interleave import (
    NOTHING_YET,
    RunEnd,
    end_of,
    interleave_epoch,
    longest_run,
    run_lengths,
    shortest_feasible_run,
)


def orders(counts: tuple[int, ...], *, max_run: int, epochs: int, seed: int = 0) -> list[list[int]]:
    limit = max(max_run, shortest_feasible_run(counts, epochs=epochs))
    after, result = NOTHING_YET, []
    for epoch in range(epochs):
        rng = np.random.default_rng((seed, epoch))
        order = interleave_epoch(counts, limit=limit, after=after, epochs_after=epochs - epoch - 1, rng=rng)
        after = end_of(order, after=after)
        result.append(order.tolist())
    return result


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


@settings(max_examples=150, deadline=None, derandomize=True)
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


def test_five_hundred_feasible_mixes_never_break_the_limit() -> None:
    rng = np.random.default_rng(5)
    checked = 0
    while checked < 500:
        total = int(rng.integers(20, 400))
        counts = tuple(rng.multinomial(total, rng.dirichlet([0.6] * 6)).tolist())
        if max(counts) > 0.75 * total or shortest_feasible_run(counts, epochs=2) > 3:
            continue
        whole = [bucket for order in orders(counts, max_run=3, epochs=2, seed=checked) for bucket in order]
        assert run_of(whole) <= 3, counts
        checked += 1


class AskedError(Exception):
    """The greedy was asked."""


@pytest.fixture
def merge_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def order(*_: object, **__: object) -> None:
        raise AskedError

    monkeypatch.setattr(interleave._RunGuard, "order", order)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(shares=st.lists(st.integers(1, 100), min_size=2, max_size=6), total=st.integers(300, 3000), seed=st.integers(0, 9))
def test_the_merge_keeps_runs_of_two_and_three_without_the_greedy_whenever_the_top_share_allows(
    shares: list[int], total: int, seed: int
) -> None:
    counts = tuple(max(1, total * share // sum(shares)) for share in shares)
    for limit in (2, 3):
        if max(counts) <= limit * (sum(counts) - max(counts)):
            circle = interleave._merge(counts, limit=limit, jitter=False, rng=np.random.default_rng(seed))
            assert longest_run(circle, after=NOTHING_YET) <= limit


@pytest.mark.usefixtures("merge_alone")
def test_a_million_batches_are_ordered_without_the_greedy() -> None:
    counts = (400_000, 250_000, 150_000, 120_000, 60_000, 20_000)
    order = interleave_epoch(counts, limit=3, after=NOTHING_YET, epochs_after=2, rng=np.random.default_rng(0))
    assert np.bincount(order).tolist() == list(counts)
    assert longest_run(order, after=NOTHING_YET) <= 3
    for bucket, count in enumerate(counts):
        seen = np.cumsum(order == bucket)
        wanted = count * np.arange(1, len(order) + 1) / len(order)
        assert np.abs(seen - wanted).max() < 5, f"bucket {bucket} runs ahead or falls behind"


@settings(max_examples=120, deadline=None, derandomize=True)
@given(shares=st.lists(st.integers(1, 100), min_size=1, max_size=6), total=st.integers(6, 2000), seed=st.integers(0, 3))
def test_every_bucket_lasts_until_one_stride_before_the_end(shares: list[int], total: int, seed: int) -> None:
    counts = tuple(max(1, total * share // sum(shares)) for share in shares)
    if max(counts) > 3 * (sum(counts) - max(counts)):
        return  # nothing to spare: the greedy keeps the run limit instead
    for order in orders(counts, max_run=3, epochs=2, seed=seed):
        for bucket, count in enumerate(counts):
            last = max(place for place, chosen in enumerate(order) if chosen == bucket)
            assert (len(order) - 1 - last) * count <= len(order)


def test_the_greedy_is_proportional_too() -> None:
    counts = (400, 250, 150, 100, 60, 40)
    rng = np.random.default_rng(1)
    wishes = [((np.arange(count) + rng.random(count)) / count).tolist() for count in counts]
    order = interleave._RunGuard(counts, limit=3, after=NOTHING_YET).order(wishes, epochs_after=0)
    assert run_of(order) <= 3
    for bucket, count in enumerate(counts):
        seen = np.cumsum([chosen == bucket for chosen in order])
        assert np.abs(seen - count * np.arange(1, len(order) + 1) / len(order)).max() < 6


def test_epochs_and_seeds_differ_and_repeat() -> None:
    counts = (30, 20, 9, 5)
    first = orders(counts, max_run=3, epochs=3, seed=1)
    assert first == orders(counts, max_run=3, epochs=3, seed=1)
    assert first[0] != first[1] != first[2]
    assert first[0] != orders(counts, max_run=3, epochs=3, seed=2)[0]


def test_a_mix_of_one_bucket_is_one_run() -> None:
    assert orders((4,), max_run=3, epochs=2) == [[0] * 4, [0] * 4]
    assert shortest_feasible_run((4,), epochs=2) == 8


def test_an_infeasible_limit_still_gives_every_batch() -> None:
    order = interleave_epoch((9, 1), limit=2, after=RunEnd(0, 2), epochs_after=3, rng=np.random.default_rng(0))
    assert sorted(order.tolist()) == [0] * 9 + [1]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(values=st.lists(st.integers(0, 2), max_size=12), cut=st.integers(0, 12))
def test_runs_are_counted_across_a_cut(values: list[int], cut: int) -> None:
    head, tail = np.array(values[:cut], np.int64), np.array(values[cut:], np.int64)
    after = end_of(head, after=NOTHING_YET)
    assert max(longest_run(head, after=NOTHING_YET), longest_run(tail, after=after)) == run_of(values)
    assert end_of(tail, after=after) == end_of(np.array(values, np.int64), after=NOTHING_YET)
    assert run_lengths(np.array(values, np.int64)).tolist() == [len(list(run)) for _, run in groupby(values)]
