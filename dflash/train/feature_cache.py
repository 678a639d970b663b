"""The target's states of whole samples on disk: computed in a run's first epoch, read in later ones and by later runs.

Dimensions: T tokens of a sample, W numbers a token.
Invariant: what is read is what was stored, bit by bit (a checksum stands behind every sample; a damaged file is computed again),
and a cache can be lost, full or unwritable without any harm but time.
Hard decision: which samples are kept is settled beforehand (in the data set's order, while they fit) and never depends on time.
An epoch visits every sample once, so pushing old samples out for new ones would keep none until it is needed again. And it makes
a resumed run meet the same hits as an uninterrupted one: states differ in the last bits with the batch they are computed in.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dflash.errors import StorageError
from dflash.storage import atomic_write_bytes, atomic_write_text

logger = logging.getLogger(__name__)

FOLDER = "features"
"""Below `run.root`: one folder a data set, target, choice of layers and number format."""

CHECKSUM_BYTES = 4
RESERVE_FRAC = 0.02
"""Share of the disk that stays free: checkpoints must still fit where a cache does not."""

_ROWS_A_FOLDER = 1000


class FeatureCache:
    """States of one data set's samples, one file each; for any number of threads and processes at once.

    Args:
        folder: made if absent; holds nothing else.
        lengths: [rows] tokens of each sample.
        width: W.
        dtype: of the states.
        max_bytes: of all files together.

    Attributes:
        kept_rows: samples 0..kept_rows-1 are kept.
        width, dtype: as given.

    Raises:
        StorageError: the folder cannot be made.
    """

    def __init__(self, folder: Path, *, lengths: NDArray[np.int32], width: int, dtype: torch.dtype, max_bytes: int) -> None:
        self.folder = folder
        self._lengths = lengths
        self.width = width
        self.dtype = dtype
        sizes = lengths.astype(np.int64) * (width * dtype.itemsize) + CHECKSUM_BYTES
        self.kept_rows = int(np.searchsorted(np.cumsum(sizes), max_bytes, side="right"))
        self._writable = True
        try:
            for first in range(0, self.kept_rows, _ROWS_A_FOLDER):
                self._file(first).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"the feature cache {folder} cannot be made: {error.strerror}",
                remedy="make run.root writable, or set train.feature_cache_gib=0",
            ) from error

    def keeps(self, row: int) -> bool:
        """Whether this sample belongs to the kept ones."""
        return row < self.kept_rows

    def visit(self, rows: Sequence[int], lengths: Sequence[int]) -> CacheVisit:
        """Read what is there of a batch's samples [B], whose lengths are [B]."""
        return CacheVisit(self, tuple(rows), tuple(lengths), tuple(self.load(row) for row in rows))

    def load(self, row: int) -> torch.Tensor | None:
        """States [T, W] of a sample on the host; None if they are not there."""
        if not self.keeps(row):
            return None
        file = self._file(row)
        try:
            data = bytearray(file.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("the feature cache cannot be read, %s is computed again: %s", file, error)
            return None
        tokens = int(self._lengths[row])
        content = memoryview(data)[:-CHECKSUM_BYTES]
        if len(content) != tokens * self.width * self.dtype.itemsize or data[-CHECKSUM_BYTES:] != _checksum(content):
            logger.warning("%s is damaged and computed again", file)
            return None
        return torch.frombuffer(content, dtype=self.dtype).view(tokens, self.width)

    def store(self, row: int, states: torch.Tensor) -> None:
        """Keep the states [T, W] of a sample; those of others and what is not finite are left out."""
        if not self._writable or not self.keeps(row) or not bool(torch.isfinite(states).all()):
            return
        content = states.detach().to("cpu", self.dtype).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        try:
            disk = shutil.disk_usage(self.folder)
            if disk.free - len(content) < RESERVE_FRAC * disk.total:
                self._give_up(f"{disk.free / 1e9:.1f} GB are left on the disk")
                return
            atomic_write_bytes(self._file(row), content + _checksum(content))
        except (OSError, StorageError) as error:
            self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        """Training does not need the cache: say so once and store nothing more."""
        self._writable = False
        logger.warning("the feature cache %s takes nothing more: %s", self.folder, why)

    def _file(self, row: int) -> Path:
        return self.folder / f"{row // _ROWS_A_FOLDER:06d}" / f"{row}.states"


@dataclass(slots=True)
class CacheVisit:
    """One batch on its way: what the cache has of it, and afterwards what the target computed.

    Attributes:
        cache: where it came from.
        rows, lengths: [B] samples and their tokens.
        known: [B] states [T, W] on the host, None where there are none.
    """

    cache: FeatureCache
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    known: tuple[torch.Tensor | None, ...]
    _new: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def to_compute(self) -> list[int]:
        """Indices in the batch that the target has to run over.

        All of them if a kept sample is missing: it is so in its first epoch, or because a store was interrupted, and then
        they shall run together as they did before, or the states would depend on the interruption.
        """
        missing = [index for index, states in enumerate(self.known) if states is None]
        return list(range(len(self.rows))) if any(self.cache.keeps(self.rows[index]) for index in missing) else missing

    def complete(self, compute: Callable[[list[int]], torch.Tensor], *, tokens: int, device: torch.device) -> torch.Tensor:
        """States of the whole batch.

        Args:
            compute: runs the target over these indices -> [their number, tokens, W].
            tokens: S, the batch's padded length.
            device: of the result.

        Returns:
            [B, S, W], zeros behind each length.
        """
        to_compute = self.to_compute
        if len(to_compute) == len(self.rows):
            batch = compute(to_compute)
        else:
            batch = torch.zeros(len(self.rows), tokens, self.cache.width, dtype=self.cache.dtype, device=device)
            if to_compute:
                batch[to_compute] = compute(to_compute)
        for index, states in enumerate(self.known):
            if states is None:
                self._new[index] = batch[index, : self.lengths[index]]
            else:
                batch[index, : self.lengths[index]] = states.to(device)
        return batch

    def keep(self) -> None:
        """Store what was computed; the device must have finished it."""
        for index, states in self._new.items():
            self.cache.store(self.rows[index], states)


def open_feature_cache(
    root: Path, *, origin: dict[str, Any], lengths: NDArray[np.int32], width: int, dtype: torch.dtype, max_bytes: int
) -> FeatureCache:
    """The cache of one origin under `root`.

    Args:
        root: `run.root`.
        origin: all that the states depend on, besides the batch they are computed in.
        lengths: [rows] tokens of each sample.
        width: numbers a token.
        dtype: of the states.
        max_bytes: of all files together.

    Raises:
        StorageError: its folder cannot be made.
    """
    described = json.dumps({**origin, "width": width, "dtype": str(dtype)}, sort_keys=True, indent=2)
    folder = root / FOLDER / hashlib.sha256(described.encode()).hexdigest()[:16]
    cache = FeatureCache(folder, lengths=lengths, width=width, dtype=dtype, max_bytes=max_bytes)
    if cache.kept_rows:
        atomic_write_text(folder / "origin.json", described + "\n")
    logger.info("feature cache %s: keeps %d of %d samples", folder, cache.kept_rows, len(lengths))
    return cache


def _checksum(content: bytes | memoryview) -> bytes:
    return zlib.crc32(content).to_bytes(CHECKSUM_BYTES, "little")
