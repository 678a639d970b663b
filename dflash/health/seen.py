"""A set of sample ids: which samples an epoch has consumed so far.

Invariant: exact, whatever the order; its text gives the same set again.
"""

from __future__ import annotations

import base64
import zlib

import numpy as np

_MAX_SAMPLE = 2**31  # a sample id beyond this is not a row of any data set: not worth the memory


class Seen:
    """A set of sample ids, one byte each in memory and one bit in a state."""

    def __init__(self, flags: bytearray) -> None:
        self._flags = flags

    def add_all(self, rows: tuple[int, ...]) -> list[int]:
        """Add samples; returns those that were there already."""
        flags = self._flags
        highest = max(rows)
        if highest >= len(flags):
            if highest >= _MAX_SAMPLE:
                return []
            flags.extend(bytes(max(highest + 1, 2 * len(flags)) - len(flags)))
        again: list[int] = []
        for row in rows:
            if flags[row]:
                again.append(row)
            flags[row] = 1
        return again

    def text(self) -> str:
        """The set as text."""
        bits = np.packbits(np.frombuffer(bytes(self._flags), dtype=np.uint8))
        return base64.b85encode(zlib.compress(bits.tobytes(), 1)).decode()

    @classmethod
    def of_text(cls, text: str) -> Seen:
        """The set that gave `text`."""
        bits = np.frombuffer(zlib.decompress(base64.b85decode(text)), dtype=np.uint8)
        return cls(bytearray(np.unpackbits(bits).tobytes()))
