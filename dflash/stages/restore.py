"""Bringing checkpoints back from the store that they were copied to, after a local disk is lost.

Invariant: what comes back is verified before it gets a checkpoint's name; a damaged copy is passed over for the one before it, and
one that a later segment has gone back behind is none.
The run's folder must be prepared again first (the same configuration gives the same plan); training then continues from the copy
as from any checkpoint, and refuses one that belongs to another run.
"""

from __future__ import annotations

import logging
from pathlib import Path

from dflash.checkpoint.remote import list_copies, live_copies, restore_copy
from dflash.errors import CheckpointError, RunStateError
from dflash.records import CheckpointManifest
from dflash.stages.run import reopen_run
from dflash.train.mirror import run_store
from dflash.train.runs import run_is_live

logger = logging.getLogger(__name__)


def restore_stage(run_dir: str | Path) -> CheckpointManifest:
    """Restore the newest good copy of a run's checkpoints.

    Returns:
        The manifest of what was restored.

    Raises:
        RunStateError: the run is being trained, has no store, or a newer checkpoint than any copy is there already.
        CheckpointError: the store has no good copy.
        StorageError: the store cannot be read.
    """
    run = reopen_run(run_dir)
    location = run.config.checkpoint.store
    if location is None:
        raise RunStateError(f"run {run.paths.root} copies its checkpoints nowhere", remedy="set checkpoint.store before training")
    if run_is_live(run.paths):
        raise RunStateError(f"run {run.paths.root} is being trained right now", remedy="stop it first")
    store = run_store(location, run.paths)
    for copy in reversed(live_copies(list_copies(store))):
        if run.paths.checkpoint(copy.step).exists():
            raise RunStateError(
                f"{run.paths.checkpoint(copy.step)} is there already, and no copy is newer",
                remedy="training continues from it by itself; remove it if it is damaged",
            )
        try:
            return restore_copy(store, copy, run.paths.checkpoints_dir)
        except CheckpointError as error:
            logger.warning("passing over a damaged copy: %s", error.what)
    raise CheckpointError(f"{store.uri} holds no good copy", remedy="check checkpoint.store and the name of the run's folder")
