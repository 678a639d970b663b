"""Small data sets of known content, written through the real shard writer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dflash.data.columns import TokenizedSample
from dflash.storage import open_store
from tests.support.data_sets import write_samples


def sample(number: int, length: int) -> TokenizedSample:
    """Sample `number`: its ids and spans tell it apart from every other; none, one or several spans."""
    ids = [(number * 31 + place * 7) % 1000 for place in range(length)]
    mask = [(number + place) % 3 > 0 and number % 11 > 0 for place in range(length)]
    edges = np.flatnonzero(np.diff(np.array([False, *mask, False]).astype(int)))
    spans = tuple((int(start), int(end)) for start, end in edges.reshape(-1, 2))
    return TokenizedSample(f"s{number}", f"kind{number % 3}", ids, spans, turns=1 + number % 4)


def data_set(folder: Path, lengths: Sequence[Sequence[int]], *, per_shard: int = 7, per_group: int = 3) -> list[TokenizedSample]:
    """Write one bucket for each list of lengths; returns the samples in global row order."""
    buckets = [[sample(100 * bucket + place, length) for place, length in enumerate(own)] for bucket, own in enumerate(lengths)]
    edges = [64] * len(lengths)
    write_samples(open_store(folder), buckets, edges=edges, rows_per_shard=per_shard, rows_per_group=per_group)
    return [item for own in buckets for item in own]
