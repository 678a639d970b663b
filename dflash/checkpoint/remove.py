"""Deleting checkpoints: a folder loses its name first, so that half a checkpoint is never found under a full one's name."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from dflash.checkpoint import layout
from dflash.storage import fsync_dir

logger = logging.getLogger(__name__)


def remove_checkpoint(directory: Path, step: int) -> None:
    """Delete the checkpoint of `step`, if it is there."""
    folder = directory / layout.folder_name(step)
    doomed = folder.with_name(folder.name + layout.DELETED_SUFFIX)
    if doomed.exists():
        shutil.rmtree(doomed)
    if folder.exists():
        folder.rename(doomed)
        fsync_dir(directory)
        shutil.rmtree(doomed)


def remove_leftovers(directory: Path) -> list[str]:
    """Delete what killed writers and killed deletions left; only while nothing writes there. Returns the names."""
    names = []
    for path in layout.leftovers(directory):
        logger.info("removing %s, left by a writer that was killed", path)
        shutil.rmtree(path)
        names.append(path.name)
    return names
