"""Bucket edges: least padding against every choice of edges, equal token mass, and the bucket of a length."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data.buckets import (
    auto_edges,
    bucket_of,
    count_lengths,
    equal_mass_edges,
    least_padding,
    padded_histogram,
)
from dflash.errors import DataError


def padded_tokens(chosen: list[int], lengths: list[int], counts: list[int]) -> int:
    """Every sample raised to the first chosen length that holds it."""
    return sum(count * min(e for e in chosen if e >= length) for length, count in zip(lengths, counts, strict=True))


HISTOGRAMS = st.dictionaries(st.integers(1, 40), st.integers(1, 9), min_size=1, max_size=9)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(histogram=HISTOGRAMS, limit=st.integers(1, 6))
def test_no_other_choice_of_lengths_pads_less(histogram: dict[int, int], limit: int) -> None:
    lengths = sorted(histogram)
    counts = [histogram[length] for length in lengths]
    chosen = [lengths[index] for index in least_padding(lengths, counts, limit=limit)]
    assert chosen == sorted(set(chosen))
    assert chosen[-1] == lengths[-1]
    assert len(chosen) == min(limit, len(lengths))
    ways = combinations(lengths[:-1], len(chosen) - 1)
    assert padded_tokens(chosen, lengths, counts) == min(padded_tokens([*way, lengths[-1]], lengths, counts) for way in ways)


def quadratic(lengths: np.ndarray, counts: np.ndarray, groups: int) -> int:
    """The same programme without any trick: every start of every group."""
    upto = np.concatenate([[0], np.cumsum(counts)])
    best = np.concatenate([[0], lengths * upto[1:]])
    for _ in range(groups - 1):
        following = best.copy()
        for end in range(1, len(best)):
            following[end] = (best[:end] + lengths[end - 1] * (upto[end] - upto[:end])).min()
        best = following
    return int(best[-1])


@pytest.mark.parametrize(("groups", "seed"), [(2, 0), (6, 1), (6, 2), (32, 3)])
def test_the_hull_equals_the_plain_programme_on_many_lengths(groups: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.unique(rng.integers(1, 3000, 700))
    counts = rng.integers(1, 10**6, len(lengths))
    chosen = least_padding(lengths.tolist(), counts.tolist(), limit=groups)
    found = padded_tokens([int(lengths[i]) for i in chosen], lengths.tolist(), counts.tolist())
    assert found == quadratic(lengths, counts, groups)


def test_huge_counts_do_not_overflow() -> None:
    lengths, counts = list(range(1, 8193)), [10**11] * 8192
    assert least_padding(lengths, counts, limit=2) == [4095, 8191]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=60),
    buckets=st.integers(1, 4),
    multiple=st.sampled_from([1, 4, 16, 100]),
    spare=st.integers(0, 40),
)
def test_auto_edges_pad_least_of_all_edges_on_the_grid(lengths: list[int], buckets: int, multiple: int, spare: int) -> None:
    longest = max(lengths) + spare
    edges = auto_edges(count_lengths(np.array(lengths), longest=longest), buckets=buckets, pad_multiple_tokens=multiple)
    assert list(edges) == sorted(set(edges))
    assert edges[-1] == longest
    assert all(edge % multiple == 0 for edge in edges[:-1])
    padded = [-(-length // multiple) * multiple for length in lengths]
    grid, ones = sorted(set(padded)), [1] * len(padded)
    mine = padded_tokens([*edges[:-1], grid[-1]], padded, ones)
    ways = (way for size in range(buckets) for way in combinations(grid[:-1], size))
    assert mine == min(padded_tokens([*way, grid[-1]], padded, ones) for way in ways)


def test_all_samples_of_one_length_make_one_bucket() -> None:
    assert auto_edges(count_lengths(np.full(9, 50), longest=256), buckets=6, pad_multiple_tokens=8) == (256,)
    assert equal_mass_edges(count_lengths(np.full(9, 50), longest=256), buckets=6, pad_multiple_tokens=8) == (256,)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=80), buckets=st.integers(1, 5), spare=st.integers(0, 9))
def test_equal_mass_edges_share_tokens_to_within_one_length(lengths: list[int], buckets: int, spare: int) -> None:
    longest = max(lengths) + spare
    edges = equal_mass_edges(count_lengths(np.array(lengths), longest=longest), buckets=buckets, pad_multiple_tokens=1)
    assert list(edges) == sorted(set(edges))
    assert edges[-1] == longest
    assert len(edges) <= buckets
    total, most = sum(lengths), max(sum(n for n in lengths if n == value) for value in set(lengths))
    for edge in edges[:-1]:
        mass = sum(length for length in lengths if length <= edge)
        assert min(abs(mass - total * k / buckets) for k in range(1, buckets)) <= most / 2


def test_six_buckets_of_many_lengths_share_the_tokens_evenly() -> None:
    lengths = np.clip(np.exp(np.random.default_rng(0).normal(np.log(900), 0.9, 50_000)), 32, 8192).astype(np.int64)
    edges = equal_mass_edges(count_lengths(lengths, longest=8192), buckets=6, pad_multiple_tokens=16)
    shares = np.bincount(np.searchsorted(edges, lengths), weights=lengths, minlength=6) / lengths.sum()
    assert len(edges) == 6
    assert all(edge % 16 == 0 for edge in edges)
    assert np.abs(shares - 1 / 6).max() < 0.01


def test_lengths_are_counted_in_bulk_and_bad_ones_refused() -> None:
    lengths = np.random.default_rng(1).integers(1, 50, 1000).astype(np.int32)
    assert count_lengths(lengths, longest=60).tolist() == [int((lengths == n).sum()) for n in range(61)]
    assert len(count_lengths(lengths, longest=None)) == lengths.max() + 1
    with pytest.raises(DataError, match="1 to 10 are allowed"):
        count_lengths(np.array([3, 11]), longest=10)
    with pytest.raises(DataError, match="0 to 11 tokens"):
        count_lengths(np.array([0, 11]), longest=20)


@pytest.mark.parametrize("edges_of", [auto_edges, equal_mass_edges])
def test_edges_of_nothing_are_refused(edges_of: object) -> None:
    with pytest.raises(DataError, match="no sample"):
        edges_of(np.zeros(9, np.int64), buckets=3, pad_multiple_tokens=8)  # type: ignore[operator]
    with pytest.raises(DataError, match="3 samples have no token"):
        edges_of(np.array([3, 1]), buckets=3, pad_multiple_tokens=8)  # type: ignore[operator]


def test_padded_lengths_are_counted_together() -> None:
    padded, counts = padded_histogram(count_lengths(np.array([1, 8, 9, 17, 17, 24]), longest=30), pad_multiple_tokens=8)
    assert padded.tolist() == [8, 16, 24]
    assert counts.tolist() == [2, 1, 3]


def test_an_edge_belongs_to_the_bucket_below_it() -> None:
    assert [bucket_of(length, (8, 16, 20)) for length in (1, 8, 9, 16, 17, 20)] == [0, 0, 1, 1, 2, 2]
