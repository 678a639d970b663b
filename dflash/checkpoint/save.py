"""Durable write of one checkpoint.

Invariant: whatever file operation is the last that happens, the newest complete checkpoint on disk verifies; the
manifest is written last, the folder gets its name by one rename after everything in it is synced, and an older folder
of the same step goes only once the new one stands.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash.checkpoint import layout
from dflash.checkpoint.pointers import point_to
from dflash.checkpoint.tensors import all_finite, global_norm, write_tensors
from dflash.errors import DflashError
from dflash.records import CheckpointManifest, FileEntry, TrainerState, to_json
from dflash.storage import atomic_write_text, fsync_dir, sha256_file


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """What a checkpoint belongs to; the same for all checkpoints of a run."""

    data_fingerprint: str
    target_fingerprint: str
    mask_token_id: int


@dataclass(frozen=True, slots=True)
class CheckpointContent:
    """Everything that one checkpoint saves; tensors lie contiguous in CPU memory and do not change meanwhile."""

    state: TrainerState
    identity: RunIdentity
    drafter: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]


def save_checkpoint(
    directory: Path, content: CheckpointContent, *, created_at: str, on_operation: Callable[[str], None]
) -> CheckpointManifest:
    """Write `step-N` durably and move the `latest` pointer to it.

    Args:
        directory: folder of all checkpoints, created if missing.
        content: state and tensors.
        created_at: UTC time for the manifest.
        on_operation: called with a name before each file operation (observation, fault injection).

    Returns:
        The manifest as written.

    Raises:
        OSError, StorageError: the disk refuses; nothing of the new checkpoint is visible then.
    """
    name = layout.folder_name(content.state.step)
    final, temporary = directory / name, directory / (name + layout.WRITING_SUFFIX)
    on_operation("prepare")
    directory.mkdir(parents=True, exist_ok=True)
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    try:
        manifest = _write_files(temporary, content, created_at=created_at, on_operation=on_operation)
        _rename_into_place(temporary, final, on_operation)
    except (OSError, DflashError):
        # Half a checkpoint on a full disk would be in the way of the next one.
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    on_operation("pointer")
    point_to(directory, layout.LATEST, content.state.step)
    return manifest


def _write_files(
    temporary: Path, content: CheckpointContent, *, created_at: str, on_operation: Callable[[str], None]
) -> CheckpointManifest:
    on_operation("drafter")
    entries = [write_tensors(temporary / layout.DRAFTER_FILE, content.drafter)]
    on_operation("optimizer")
    entries.append(write_tensors(temporary / layout.OPTIMIZER_FILE, content.optimizer))
    on_operation("state")
    entries.append(_write_state(temporary / layout.STATE_FILE, content.state))
    manifest = _manifest(content, tuple(entries), created_at)
    on_operation("manifest")
    atomic_write_text(temporary / layout.MANIFEST_FILE, to_json(manifest, indent=2))
    return manifest


def _rename_into_place(temporary: Path, final: Path, on_operation: Callable[[str], None]) -> None:
    replaced = final.with_name(final.name + layout.REPLACED_SUFFIX)
    on_operation("clear")
    if replaced.exists():
        shutil.rmtree(replaced)
    if final.exists():
        # Only a condemned or abandoned checkpoint of the same step is ever in the way; older steps still stand.
        on_operation("set aside")
        final.rename(replaced)
    on_operation("rename")
    temporary.rename(final)
    on_operation("sync folder")
    fsync_dir(final.parent)
    on_operation("remove replaced")
    if replaced.exists():
        shutil.rmtree(replaced)


def _write_state(path: Path, state: TrainerState) -> FileEntry:
    atomic_write_text(path, to_json(state, indent=2))
    return FileEntry(name=path.name, size_bytes=path.stat().st_size, sha256=sha256_file(path))


def _manifest(content: CheckpointContent, files: tuple[FileEntry, ...], created_at: str) -> CheckpointManifest:
    state, identity = content.state, content.identity
    return CheckpointManifest(
        step=state.step,
        segment=state.segment,
        plan_position=state.plan_position,
        plan_sha256=state.plan_sha256,
        data_fingerprint=identity.data_fingerprint,
        target_fingerprint=identity.target_fingerprint,
        mask_token_id=identity.mask_token_id,
        created_at=created_at,
        finite=all_finite(content.drafter) and all_finite(content.optimizer),
        weights_norm=_json_number(global_norm(content.drafter)),
        files=files,
    )


def _json_number(value: float) -> float:
    """JSON has no NaN; `finite` says so, and -1 is no possible norm."""
    return value if value == value and value != float("inf") else -1.0  # noqa: PLR0124
