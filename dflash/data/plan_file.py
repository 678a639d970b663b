"""The plan on disk: one `.npy` file an array and epoch, and `manifest.json`, written last.

Invariant: the manifest holds the hash of every array, so a plan that loads is the plan that was written. Arrays are memory-mapped,
never unpickled; an epoch is written before the next one is made.
"""

from __future__ import annotations

import os
import tokenize
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from dflash.data.plan_arrays import ARRAY_NAMES, BatchPlan, EpochArrays, describe_array, describe_epoch, plan_sha256
from dflash.errors import DataError, StorageError
from dflash.records import PlanArray, PlanManifest, from_sealed_json, to_sealed_json
from dflash.storage import atomic_write_text, fsync_dir

MANIFEST_FILE = "manifest.json"

_BROKEN_NPY = (OSError, ValueError, TypeError, SyntaxError, EOFError, OverflowError, MemoryError, tokenize.TokenError)
"""What numpy raises for a missing, cut or damaged file; its header is a Python literal."""


class PlanWriter:
    """Writes a plan epoch by epoch; nothing counts until `finish`.

    Args:
        plan_dir: created if absent; arrays that an interrupted plan left there are removed.

    Raises:
        StorageError: the folder cannot be written.
    """

    def __init__(self, plan_dir: Path) -> None:
        self._dir = plan_dir
        self._epochs = 0
        plan_dir.mkdir(parents=True, exist_ok=True)
        for left_over in plan_dir.glob("epoch-*.npy"):
            left_over.unlink()

    def add(self, arrays: EpochArrays) -> tuple[PlanArray, ...]:
        """Write the next epoch durably; returns its entries for the manifest."""
        entries = describe_epoch(arrays, epoch=self._epochs)
        for entry, (_, array) in zip(entries, arrays.named(), strict=True):
            _write_array(self._dir / entry.path, array)
        self._epochs += 1
        return entries

    def finish(self, manifest: PlanManifest) -> None:
        """Write the manifest: the plan is complete."""
        fsync_dir(self._dir)
        atomic_write_text(self._dir / MANIFEST_FILE, to_sealed_json(manifest))


def read_plan_manifest(plan_dir: Path) -> PlanManifest:
    """What a stored plan is, without reading its arrays.

    Raises:
        SchemaVersionError: written with another schema version.
        DataError: there is no plan, or its manifest is damaged.
    """
    file = plan_dir / MANIFEST_FILE
    if not file.is_file():
        raise DataError(f"there is no batch plan in {plan_dir}", remedy="prepare the run first: it builds the plan")
    return from_sealed_json(PlanManifest, file.read_bytes(), origin=str(file))


def load_plan(plan_dir: Path) -> BatchPlan:
    """Map a plan into memory and verify every array.

    Raises:
        SchemaVersionError: written with another schema version.
        DataError: missing, or not the plan that its manifest describes.
    """
    manifest = read_plan_manifest(plan_dir)
    entries = {(entry.epoch, entry.name): entry for entry in manifest.arrays}
    wanted = [(epoch, name) for epoch in range(manifest.epochs) for name in ARRAY_NAMES]
    if sorted(entries) != sorted(wanted) or plan_sha256(manifest.arrays) != manifest.plan_sha256:
        raise DataError(
            f"{plan_dir / MANIFEST_FILE} lists arrays that do not make the plan {manifest.plan_sha256[:16]}...",
            remedy="restore the file from a copy; a run cannot go on with another plan",
        )
    epochs = [
        EpochArrays(**{name: _map_array(plan_dir, entries[epoch, name]) for name in ARRAY_NAMES})
        for epoch in range(manifest.epochs)
    ]
    return BatchPlan(manifest, epochs)


def _write_array(path: Path, array: NDArray[Any]) -> None:
    try:
        with path.open("wb") as file:
            npy.write_array(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}", remedy="check that the folder has free space") from error


def _map_array(plan_dir: Path, entry: PlanArray) -> NDArray[Any]:
    path = plan_dir / entry.path
    if Path(entry.path).name != entry.path:
        raise DataError(f"the plan in {plan_dir} names a file outside its folder: {entry.path}", remedy="build the plan anew")
    try:
        array = np.asarray(npy.open_memmap(path, mode="r"))
    except _BROKEN_NPY as error:
        raise DataError(
            f"{path} is no array of a batch plan: {error}", remedy="restore the file from a copy; a run keeps its plan"
        ) from error
    if array.ndim != 1 or describe_array(array, epoch=entry.epoch, name=entry.name) != entry:
        raise DataError(
            f"{path} is not the array that the manifest describes ({entry.length} x {entry.dtype}, hash {entry.sha256[:16]}...)",
            remedy="restore the file from a copy; a run cannot go on with another plan",
        )
    return array
