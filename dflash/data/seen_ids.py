"""Which ids of one source have been met: 64 bits of a hash of each, in sorted arrays.

Memory is 8 bytes an id. Two different ids share their 64 bits with a probability of 3e-8 among a million and 3e-6 among ten
million ids; the later row would then be set aside as a duplicate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_DIGEST_BYTES = 8


def id_digests(ids: Sequence[str]) -> NDArray[np.uint64]:
    """[n] 64 bits of a hash of each id."""
    digests = b"".join(hashlib.blake2b(each.encode(), digest_size=_DIGEST_BYTES).digest() for each in ids)
    return np.frombuffer(digests, "<u8").astype(np.uint64)


class SeenIds:
    """A growing set of 64-bit digests: a few sorted arrays, each at least twice as long as the next."""

    def __init__(self) -> None:
        self._runs: list[NDArray[np.uint64]] = []

    def add(self, digests: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Add digests.

        Returns:
            [n] whether each was met before, in an earlier call or earlier in this one.
        """
        unique, first = np.unique(digests, return_index=True)
        known = np.zeros(len(unique), np.bool_)
        for run in self._runs:
            places = np.minimum(np.searchsorted(run, unique), len(run) - 1)
            known |= run[places] == unique
        duplicate = np.ones(len(digests), np.bool_)
        duplicate[first[~known]] = False
        self._append(unique[~known])
        return duplicate

    def _append(self, run: NDArray[np.uint64]) -> None:
        if not len(run):
            return
        while self._runs and len(self._runs[-1]) < 2 * len(run):
            run = np.sort(np.concatenate([self._runs.pop(), run]), kind="stable")
        self._runs.append(run)
