"""Which prompts a data set was made from: 16-byte hashes in sorted tables, one a source, searched where they lie.

Invariant: `prompt_hash(text) in hashes` holds if and only if a user turn with that normalised text belongs to a sample (but
for hash collisions: below 1e-19 for 100 M prompts).
The price: 16 bytes a distinct prompt.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dflash.data.manifest import read_data_file
from dflash.records import DataManifest
from dflash.storage import Store

DIGEST_BYTES = 16
_COMPACT_ABOVE = 1 << 20

Table = NDArray[np.uint8]
"""[n, 16], rows sorted and unique."""


class PromptHashes:
    """Membership in several tables.

    Args:
        tables: sorted unique digests, [n, 16] each.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = [_words(table) for table in tables]

    def __len__(self) -> int:
        """Digests in all; one that two sources share counts twice."""
        return sum(len(table) for table in self._tables)

    def __contains__(self, prompt_hash: object) -> bool:
        """Whether a hash of `dflash.data.synthetic.prompt_hash` (hexadecimal) is listed."""
        digest = bytes.fromhex(str(prompt_hash))[:DIGEST_BYTES]
        high, low = np.frombuffer(digest, ">u8")
        for table in self._tables:
            start, stop = (int(np.searchsorted(table[:, 0], high, side=side)) for side in ("left", "right"))
            if bool((table[start:stop, 1] == low).any()):
                return True
        return False


class PromptTable:
    """Collects digests and gives them sorted and unique; memory stays near 16 bytes a distinct digest."""

    def __init__(self) -> None:
        self._parts: list[NDArray[np.uint64]] = []
        self._loose = 0

    def add(self, digests: bytes) -> None:
        """Add digests that lie end to end."""
        if digests:
            self._parts.append(_words(np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)))
            self._loose += len(self._parts[-1])
            if self._loose > max(_COMPACT_ABOVE, len(self._parts[0])):
                self._compact()

    def table(self) -> Table:
        """Everything added so far."""
        self._compact()
        return self._parts[0].astype(">u8").view(np.uint8).reshape(-1, DIGEST_BYTES)

    def _compact(self) -> None:
        words = np.concatenate([*self._parts, np.empty((0, 2), np.uint64)])
        words = words[np.lexsort((words[:, 1], words[:, 0]))]
        new = np.ones(len(words), np.bool_)
        new[1:] = (words[1:] != words[:-1]).any(axis=1)
        self._parts, self._loose = [words[new]], 0


def write_table(path: Path, table: Table) -> None:
    """Write a table as an `.npy` file."""
    with path.open("wb") as file:
        np.save(file, np.ascontiguousarray(table), allow_pickle=False)


def read_prompt_hashes(store: Store, manifest: DataManifest) -> PromptHashes:
    """Hashes of every user turn that the data set's samples were made from.

    Raises:
        DataError: a table is not the one that was written.
    """
    return PromptHashes([np.load(io.BytesIO(read_data_file(store, file)), allow_pickle=False) for file in manifest.prompt_files])


def _words(table: Table) -> NDArray[np.uint64]:
    """[n, 2] numbers that compare as the digests' bytes do."""
    return np.ascontiguousarray(table).view(">u8").astype(np.uint64)
