"""A set of sample ids: which samples an epoch has consumed so far.

Invariant: exact, whatever the order; its text gives the same set again.

The hard decision: one bit a sample, worked on many at a time. Whether a stretch of records repeats any sample is one
question to the whole stretch, and nearly always the answer is no.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.int64]

MAX_SAMPLE = 2**28  # a sample id beyond this is not a row of any data set: not worth the memory


def samples_of(rows: Iterable[int]) -> Samples | None:
    """Sample ids as an array; None if one of them is no number of 64 bits, and so no sample."""
    try:
        return np.fromiter(rows, dtype=np.int64)
    except OverflowError:
        return None


class Seen:
    """A set of sample ids, one bit each."""

    def __init__(self) -> None:
        self._bits = np.zeros(1024, dtype=np.uint8)

    def add_new(self, rows: Sequence[int] | Samples) -> bool:
        """Add samples, at least one, if none of them is there and none comes twice; says whether it has."""
        samples = rows if isinstance(rows, np.ndarray) else samples_of(rows)
        if samples is None:
            return False
        ordered = np.sort(samples)
        if ordered[0] < 0 or ordered[-1] >= MAX_SAMPLE or (ordered[1:] == ordered[:-1]).any():
            return False
        places, flags = self._reach(samples)
        if (self._bits[places] & flags).any():
            return False
        np.bitwise_or.at(self._bits, places, flags)
        return True

    def add_all(self, rows: Sequence[int]) -> list[int]:
        """Add samples; returns those that were there already, one mention for each time."""
        if self.add_new(rows):
            return []
        return [row for row in rows if 0 <= row < MAX_SAMPLE and not self.add_new((row,))]

    def discard(self, rows: npt.NDArray[np.int32]) -> None:
        """Take samples out again."""
        if len(rows):
            places, flags = self._reach(rows)
            np.bitwise_and.at(self._bits, places, ~flags)

    def _reach(self, rows: npt.NDArray[np.integer[Any]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """Place and bit of each sample; the set grows as far as they lie."""
        samples = np.asarray(rows, dtype=np.int64)
        places = samples >> 3
        needed = int(places.max()) + 1
        if needed > len(self._bits):
            grown = np.zeros(max(needed, 2 * len(self._bits)), dtype=np.uint8)
            grown[: len(self._bits)] = self._bits
            self._bits = grown
        flags: npt.NDArray[np.uint8] = np.left_shift(1, samples & 7).astype(np.uint8)
        return places, flags

    def text(self) -> str:
        """The set as text."""
        return base64.b64encode(zlib.compress(self._bits.tobytes(), 1)).decode()

    @classmethod
    def of_text(cls, text: str) -> Seen:
        """The set that gave `text`.

        Raises:
            ValueError: it is no such text.
        """
        seen = cls()
        try:
            seen._bits = np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), dtype=np.uint8).copy()
        except zlib.error as error:
            raise ValueError(f"not a set of samples: {error}") from error
        return seen
