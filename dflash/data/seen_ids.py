"""Which ids have been met: 64 bits of a hash of each, in sorted arrays.

An id is unique inside its file; corpora that are numbered from 1 each are no mistake, so files may share ids, and a sample's
name has its file's label in front of it (see `limits.sample_ids`).
Memory is 8 bytes an id. Two different ids share their 64 bits with a probability of 3e-8 among a million and 3e-6 among ten
million ids; the later row would then be set aside as a duplicate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from dflash.records import Conversation, QuarantinedRow

_DIGEST_BYTES = 8


def id_digests(ids: Sequence[str]) -> NDArray[np.uint64]:
    """[n] 64 bits of a hash of each id."""
    digests = b"".join(hashlib.blake2b(each.encode(), digest_size=_DIGEST_BYTES).digest() for each in ids)
    return np.frombuffer(digests, "<u8").astype(np.uint64)


def duplicate_row(identifier: str, origin: str) -> QuarantinedRow:
    """The bad row that a repeated id makes of a conversation."""
    return QuarantinedRow(origin, f"duplicate_id: id {identifier!r} was used before in this file")


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
        known = self.met(unique)
        duplicate = np.ones(len(digests), np.bool_)
        duplicate[first[~known]] = False
        self._append(unique[~known])
        return duplicate

    def met(self, digests: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """[n] whether each was added before; nothing is added."""
        known = np.zeros(len(digests), np.bool_)
        for run in self._runs:
            places = np.minimum(np.searchsorted(run, digests), len(run) - 1)
            known |= run[places] == digests
        return known

    def checked(self, rows: Sequence[Conversation | QuarantinedRow]) -> Iterator[Conversation | QuarantinedRow]:
        """The same rows, but for conversations whose id was met before: each becomes a bad row."""
        met = iter(self.add(id_digests([row.id for row in rows if isinstance(row, Conversation)])).tolist())
        for row in rows:
            yield duplicate_row(row.id, row.origin) if isinstance(row, Conversation) and next(met) else row

    def _append(self, run: NDArray[np.uint64]) -> None:
        if not len(run):
            return
        while self._runs and len(self._runs[-1]) < 2 * len(run):
            run = np.sort(np.concatenate([self._runs.pop(), run]), kind="stable")
        self._runs.append(run)
