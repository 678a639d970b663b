"""Copies of checkpoints in a store (usually S3): objects first, the manifest last and only if absent.

Invariant: a copy exists iff its manifest does, and a manifest is written once: a checkpoint of one step and one segment never
changes, so its objects are immutable and an upload that was cut off goes on with the files that are missing.
Layout: `checkpoints/step-N/segment-S/{drafter.safetensors,optimizer.safetensors,trainer.json,manifest.json}`; the segment is in
the name because a rollback writes a step again.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash.checkpoint import layout
from dflash.checkpoint.load import read_manifest, verify_checkpoint
from dflash.errors import CheckpointError, DataError
from dflash.records import CheckpointManifest, RollbackEntry, from_json
from dflash.storage import Store, atomic_write_bytes, fsync_dir

ROOT = "checkpoints/"
_MANIFEST = re.compile(r"checkpoints/step-(0|[1-9]\d*)/segment-(0|[1-9]\d*)/manifest\.json")
_COPY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class RemoteCopy:
    """One complete copy; one of a later segment is newer, whatever its step: a rollback goes back in steps."""

    step: int
    segment: int

    def __lt__(self, other: RemoteCopy) -> bool:
        return (self.segment, self.step) < (other.segment, other.step)

    @property
    def prefix(self) -> str:
        """Beginning of its objects' names."""
        return f"{ROOT}{layout.folder_name(self.step)}/segment-{self.segment}/"


def list_copies(store: Store) -> list[RemoteCopy]:
    """Complete copies, the oldest first.

    Raises:
        StorageError: the store cannot be read.
    """
    matches = (_MANIFEST.fullmatch(name) for name in store.names(ROOT))
    return sorted(RemoteCopy(int(match.group(1)), int(match.group(2))) for match in matches if match)


def upload_checkpoint(store: Store, folder: Path, *, on_object: Callable[[str], None]) -> RemoteCopy:
    """Copy a complete checkpoint into the store; files that an earlier try has brought there are not sent again.

    Args:
        store: destination.
        folder: `step-N` on the local disk.
        on_object: called with a name before each object (observation, fault injection).

    Returns:
        The copy, complete now.

    Raises:
        CheckpointError: the folder is no complete checkpoint (any more).
        StorageError: the store refuses; nothing of the copy counts then.
    """
    manifest = read_manifest(folder)
    _require_plain_names(manifest, str(folder))
    copy = RemoteCopy(manifest.step, manifest.segment)
    for entry in manifest.files:
        name = copy.prefix + entry.name
        if store.size(name) == entry.size_bytes:
            continue
        on_object(entry.name)
        store.put_file(name, folder / entry.name, only_if_absent=False)
    on_object(layout.MANIFEST_FILE)
    store.put(copy.prefix + layout.MANIFEST_FILE, (folder / layout.MANIFEST_FILE).read_bytes(), only_if_absent=True)
    return copy


def live_copies(copies: Iterable[RemoteCopy]) -> list[RemoteCopy]:
    """Those that training may go on from, the oldest first: no later segment has left a copy at or before their step."""
    ordered = sorted(copies)
    return [copy for copy in ordered if not any(other.segment > copy.segment and other.step <= copy.step for other in ordered)]


def copies_to_delete(
    copies: Iterable[RemoteCopy], *, keep: int, clean: Sequence[int], rollbacks: Sequence[RollbackEntry]
) -> list[RemoteCopy]:
    """Copies that may go: those that a rollback abandoned, of the others all but the newest `keep` and the newest of a clean step.

    Args:
        copies: complete ones.
        keep: how many of the newest stay.
        clean: steps whose checkpoint is clean now.
        rollbacks: of the run; where the disk is lost nobody else knows what they abandoned.
    """
    ends = [entry for entry in rollbacks if entry.phase == "end" and entry.target_step is not None]
    ordered = sorted(copies)
    live = [copy for copy in ordered if not any(_is_abandoned(copy, entry) for entry in ends)]
    kept = set(live[-keep:]) | {max((copy for copy in live if copy.step in clean), default=live[-1] if live else None)}
    return [copy for copy in ordered if copy not in kept]


def _is_abandoned(copy: RemoteCopy, end: RollbackEntry) -> bool:
    return end.target_step is not None and copy.segment <= end.plan.segment and copy.step > end.target_step


def delete_copy(store: Store, copy: RemoteCopy) -> None:
    """Delete a copy, its manifest first, so that half of it never counts.

    Raises:
        StorageError: the store refuses.
    """
    store.delete(copy.prefix + layout.MANIFEST_FILE)
    for name in list(store.names(copy.prefix)):
        store.delete(name)


def restore_copy(store: Store, copy: RemoteCopy, directory: Path) -> CheckpointManifest:
    """Bring a copy back as `step-N` under `directory`, verified before it gets its name.

    Raises:
        CheckpointError: a file differs from the manifest, or the checkpoint is there already.
        StorageError: the store cannot be read.
    """
    final = directory / layout.folder_name(copy.step)
    if final.exists():
        raise CheckpointError(f"{final} exists already", remedy="restore into a run without it, or remove it first")
    temporary = directory / (final.name + layout.WRITING_SUFFIX)
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    data = store.read(copy.prefix + layout.MANIFEST_FILE)
    try:
        manifest = from_json(CheckpointManifest, data, origin=copy.prefix + layout.MANIFEST_FILE)
    except DataError as error:
        raise CheckpointError(f"the copy {copy.prefix} is damaged: {error.what}", remedy="restore an older one") from error
    _require_plain_names(manifest, copy.prefix)
    for entry in manifest.files:
        with store.open(copy.prefix + entry.name) as source, (temporary / entry.name).open("wb") as file:
            shutil.copyfileobj(source, file, _COPY_BYTES)
            file.flush()
            os.fsync(file.fileno())
    atomic_write_bytes(temporary / layout.MANIFEST_FILE, data)
    verify_checkpoint(temporary)
    temporary.rename(final)
    fsync_dir(directory)
    return manifest


def _require_plain_names(manifest: CheckpointManifest, origin: str) -> None:
    """A manifest that names a file elsewhere would have that file sent away, or written over."""
    for entry in manifest.files:
        if not layout.is_file_name(entry.name):
            raise CheckpointError(f"{origin}: the manifest names a file outside it, {entry.name!r}", remedy="use an older one")
