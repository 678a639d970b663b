"""Length buckets: a sample belongs to the first bucket whose upper edge is at least its length; and where edges should lie.

`auto` edges are exact. With distinct padded lengths v_0 < ... < v_{m-1}, held by n_0, ..., n_{m-1} samples, and N_j = n_0 + ... +
n_{j-1}, the padded tokens of the best k buckets over the first j lengths are
    B_k(j) = v_{j-1} N_j + min_{i<j} (B_{k-1}(i) - v_{j-1} N_i):
the least of straight lines in v_{j-1}, their slopes falling with i and the queries rising with j. A convex hull of lines answers
each query in amortised constant time, so the whole programme is O(k m) (the monotone case of the convex-hull trick).
Hard decision: Python's integers. With 10^8 samples of 8192 tokens the comparison of two crossings exceeds 64 bits, and a
float would make `exact` untrue; 8192 lengths and six buckets take 0.05 s all the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash.errors import DataError

IntArray = NDArray[np.int64]

_COUNT_CHUNK = 1 << 22


def bucket_of(length: int, edges: Sequence[int]) -> int:
    """The bucket of a sample.

    Args:
        length: in tokens, at least 1.
        edges: inclusive upper edges, strictly increasing.

    Returns:
        Index k with `edges[k-1] < length <= edges[k]`.

    Raises:
        DataError: the sample is longer than the last edge, or empty.
    """
    if not 1 <= length <= edges[-1]:
        raise DataError(
            f"a sample of {length} tokens fits no bucket (edges {list(edges)})",
            remedy="raise the last of data.bucket_edges_tokens, or lower data.max_length_tokens",
        )
    return bisect_left(edges, length)


def count_lengths(lengths: NDArray[Any], *, longest: int | None) -> IntArray:
    """Histogram of lengths: [L+1] samples of each length, L the longest allowed (the longest there is for None).

    Raises:
        DataError: a sample is empty or longer than `longest`.
    """
    found = int(lengths.max()) if len(lengths) else 0
    last = found if longest is None else longest
    if len(lengths) and (int(lengths.min()) < 1 or found > last):
        raise DataError(
            f"samples have {int(lengths.min())} to {found} tokens, 1 to {last} are allowed",
            remedy="raise data.max_length_tokens, or remove the samples",
        )
    counts = np.zeros(last + 1, np.int64)
    for start in range(0, len(lengths), _COUNT_CHUNK):  # `bincount` makes an int64 copy of what it counts
        counts += np.bincount(lengths[start : start + _COUNT_CHUNK], minlength=last + 1)
    return counts


def padded_histogram(length_counts: IntArray, *, pad_multiple_tokens: int) -> tuple[IntArray, IntArray]:
    """Distinct padded lengths that occur, ascending [m], and the samples of each [m]."""
    lengths = np.flatnonzero(length_counts)
    multiples = -(-lengths // pad_multiple_tokens)
    counts = np.zeros(int(multiples.max(initial=0)) + 1, np.int64)
    np.add.at(counts, multiples, length_counts[lengths])
    present = np.flatnonzero(counts)
    return present * pad_multiple_tokens, counts[present]


def auto_edges(length_counts: IntArray, *, buckets: int, pad_multiple_tokens: int) -> tuple[int, ...]:
    """Edges that pad least when every sample is padded to the upper edge of its bucket; exact.

    Args:
        length_counts: [L+1] samples of each length 0..L; L is the longest length allowed.
        buckets: buckets wanted; fewer come back where fewer distinct padded lengths occur.
        pad_multiple_tokens: all edges but the last are multiples of it.

    Returns:
        Strictly increasing inclusive upper edges; the last is L, so that a later, longer sample finds a bucket. The samples of
        the last bucket are counted with the longest padded length that occurs, as no batch is padded beyond it.

    Raises:
        DataError: no samples, or empty ones.
    """
    _check_counts(length_counts)
    padded, counts = padded_histogram(length_counts, pad_multiple_tokens=pad_multiple_tokens)
    chosen = least_padding(padded.tolist(), counts.tolist(), limit=buckets)
    return (*(int(padded[index]) for index in chosen[:-1]), len(length_counts) - 1)


def equal_mass_edges(length_counts: IntArray, *, buckets: int, pad_multiple_tokens: int) -> tuple[int, ...]:
    """Edges that share the real tokens as evenly as whole padded lengths allow; see `auto_edges` for arguments and errors.

    Returns:
        Strictly increasing edges, the last L; each inner one is the padded length whose token mass is closest to k/buckets.
    """
    _check_counts(length_counts)
    multiple, longest = pad_multiple_tokens, len(length_counts) - 1
    padded, _ = padded_histogram(length_counts, pad_multiple_tokens=multiple)
    tokens = np.cumsum(np.arange(longest + 1) * length_counts)
    mass = tokens[np.minimum(padded, longest)]
    wanted = tokens[-1] * np.arange(1, buckets) / buckets
    above = np.searchsorted(mass, wanted)
    below = np.maximum(above - 1, 0)
    nearest = np.where(wanted - mass[below] < mass[above] - wanted, below, above)
    inner = sorted({int(edge) for edge in padded[nearest] if edge < longest and edge != padded[-1]})
    return (*inner, longest)


def least_padding(lengths: Sequence[int], counts: Sequence[int], *, limit: int) -> list[int]:
    """Choose at most `limit` of the lengths so that raising every sample to the next chosen length adds least; exact.

    Args:
        lengths: [m] strictly increasing, m >= 1.
        counts: [m] samples of each, positive.
        limit: lengths to choose.

    Returns:
        Ascending indices into `lengths`; the last is m-1, and there are min(limit, m) of them.
    """
    upto = [0, *accumulate(counts)]
    best = [0, *(length * total for length, total in zip(lengths, upto[1:], strict=True))]
    groups = min(limit, len(lengths))
    parents: list[list[int]] = []
    for group in range(2, groups + 1):
        best, parent = _one_more_group(lengths, upto, best, group=group)
        parents.append(parent)
    chosen, end = [], len(lengths)
    for parent in reversed(parents):
        chosen.append(end - 1)
        end = parent[end]
    return [end - 1, *reversed(chosen)]


def _one_more_group(lengths: Sequence[int], upto: Sequence[int], best: Sequence[int], *, group: int) -> tuple[list[int], list[int]]:
    """B_group from B_{group-1}, and where the last group begins; entries below `group` lengths are never used."""
    hull: deque[int] = deque()
    result, parent = [0] * len(best), [0] * len(best)
    for end in range(group, len(best)):
        _add_line(hull, end - 1, upto, best)
        x = lengths[end - 1]
        while len(hull) > 1 and best[hull[1]] - x * upto[hull[1]] <= best[hull[0]] - x * upto[hull[0]]:
            hull.popleft()
        begin = hull[0]
        result[end] = best[begin] + x * (upto[end] - upto[begin])
        parent[end] = begin
    return result, parent


def _add_line(hull: deque[int], new: int, upto: Sequence[int], best: Sequence[int]) -> None:
    """Append the line of `new`, the steepest so far, and drop those that it makes useless."""
    while len(hull) > 1:
        middle, before = hull[-1], hull[-2]
        # `middle` is least nowhere if `new` meets `before` no later than `middle` does.
        if (best[new] - best[before]) * (upto[middle] - upto[before]) > (best[middle] - best[before]) * (upto[new] - upto[before]):
            break
        hull.pop()
    hull.append(new)


def _check_counts(length_counts: IntArray) -> None:
    if len(length_counts) < 2 or not length_counts.any():
        raise DataError("there is no sample to place bucket edges for", remedy="build a data set that holds samples")
    if length_counts[0]:
        raise DataError(f"{int(length_counts[0])} samples have no token", remedy="remove the empty samples")
