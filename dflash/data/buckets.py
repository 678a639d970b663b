"""Length buckets: a sample belongs to the first bucket whose upper edge is at least its length."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from dflash.errors import DataError


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
