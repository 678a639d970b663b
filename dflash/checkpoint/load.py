"""Verification and loading: nothing of a checkpoint is used before all of it has been hashed.

Nothing here can execute code: safetensors and JSON only.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash.checkpoint import layout
from dflash.errors import CheckpointError, DataError, StorageError
from dflash.records import CheckpointManifest, FileEntry, TrainerState, from_json
from dflash.storage import get_bytes, sha256_file

if TYPE_CHECKING:
    import torch

_REMEDY = "use an older checkpoint of the run (a new start of the training does so by itself)"
_WANTED_FILES = {layout.DRAFTER_FILE, layout.OPTIMIZER_FILE, layout.STATE_FILE}


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A verified checkpoint in CPU memory, tensors by name."""

    manifest: CheckpointManifest
    state: TrainerState
    drafter: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]


def read_manifest(path: Path) -> CheckpointManifest:
    """The manifest of the checkpoint folder `path`, without verifying the files it names.

    Raises:
        CheckpointError: it is missing or is not a manifest.
    """
    file = path / layout.MANIFEST_FILE
    try:
        about = file.stat()
    except OSError as error:
        raise CheckpointError(f"{path} is not a complete checkpoint: it has no readable manifest.json", remedy=_REMEDY) from error
    return _parsed_manifest(path, (about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns))


@functools.lru_cache(maxsize=256)
def _parsed_manifest(path: Path, _version: tuple[int, ...]) -> CheckpointManifest:
    """Parsed once a version of the file: the supervisor looks at every manifest twice a second."""
    file = path / layout.MANIFEST_FILE
    try:
        return from_json(CheckpointManifest, get_bytes(file), origin=str(file))
    except StorageError as error:
        raise CheckpointError(f"{path} is not a complete checkpoint: it has no readable manifest.json", remedy=_REMEDY) from error
    except DataError as error:
        raise CheckpointError(f"{path} is damaged: {error.what}", remedy=_REMEDY) from error


def verify_checkpoint(path: Path) -> CheckpointManifest:
    """Check every file of a checkpoint against its manifest: presence, size, SHA-256.

    Returns:
        The manifest.

    Raises:
        CheckpointError: something is missing or differs; the message names the file and both values.
    """
    manifest = read_manifest(path)
    if layout.step_of(path.name) not in (None, manifest.step):
        raise CheckpointError(f"{path} holds the state of step {manifest.step}", remedy=_REMEDY)
    missing = _WANTED_FILES - {entry.name for entry in manifest.files}
    if missing:
        raise CheckpointError(f"{path}: the manifest does not name {sorted(missing)}", remedy=_REMEDY)
    for entry in manifest.files:
        _verify_file(path / entry.name, entry)
    return manifest


def load_checkpoint(path: Path) -> LoadedCheckpoint:
    """Verify a checkpoint, then read it.

    Raises:
        CheckpointError: see `verify_checkpoint`.
    """
    manifest = verify_checkpoint(path)
    state_file = path / layout.STATE_FILE
    try:
        state = from_json(TrainerState, get_bytes(state_file), origin=str(state_file))
    except DataError as error:
        raise CheckpointError(f"{path} cannot be used: {error.what}", remedy=_REMEDY) from error
    return LoadedCheckpoint(
        manifest=manifest,
        state=state,
        drafter=_tensors(path / layout.DRAFTER_FILE),
        optimizer=_tensors(path / layout.OPTIMIZER_FILE),
    )


def load_drafter(path: Path) -> tuple[CheckpointManifest, dict[str, torch.Tensor]]:
    """Verify and read a checkpoint's weights alone, whatever became of its optimizer's file.

    Raises:
        CheckpointError: they are missing or damaged.
    """
    manifest = read_manifest(path)
    entries = [entry for entry in manifest.files if entry.name == layout.DRAFTER_FILE]
    if not entries:
        raise CheckpointError(f"{path}: the manifest does not name {layout.DRAFTER_FILE}", remedy=_REMEDY)
    _verify_file(path / layout.DRAFTER_FILE, entries[0])
    return manifest, _tensors(path / layout.DRAFTER_FILE)


def read_state(path: Path) -> TrainerState:
    """The trainer state of the checkpoint folder `path`, checked against its manifest.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    entries: Mapping[str, FileEntry] = {entry.name: entry for entry in read_manifest(path).files}
    file = path / layout.STATE_FILE
    if layout.STATE_FILE not in entries:
        raise CheckpointError(f"{path}: the manifest does not name {layout.STATE_FILE}", remedy=_REMEDY)
    _verify_file(file, entries[layout.STATE_FILE])
    try:
        return from_json(TrainerState, get_bytes(file), origin=str(file))
    except DataError as error:
        raise CheckpointError(f"{path} cannot be used: {error.what}", remedy=_REMEDY) from error


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file whose hash fits its manifest, which says nothing about who wrote both."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file  # a look at manifests does not pay for torch

    try:
        return load_file(file)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{file} is no readable safetensors file: {error}", remedy=_REMEDY) from error


def _verify_file(file: Path, entry: FileEntry) -> None:
    if not layout.is_file_name(entry.name):
        raise CheckpointError(f"{file.parent}: the manifest names a file outside it, {entry.name!r}", remedy=_REMEDY)
    try:
        size_bytes = file.stat().st_size
        found = sha256_file(file)
    except (OSError, StorageError) as error:
        raise CheckpointError(f"{file} is missing or unreadable", remedy=_REMEDY) from error
    if size_bytes != entry.size_bytes:
        raise CheckpointError(f"{file} has {size_bytes} bytes, its manifest says {entry.size_bytes}", remedy=_REMEDY)
    if found != entry.sha256:
        raise CheckpointError(f"{file} is damaged: SHA-256 is {found}, its manifest says {entry.sha256}", remedy=_REMEDY)
