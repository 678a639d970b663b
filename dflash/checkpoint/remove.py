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


def set_aside(directory: Path, step: int, *, segment: int) -> None:
    """Move the checkpoint of `step`, written by `segment`, where nothing continues from it; harmless to repeat."""
    folder = directory / layout.folder_name(step)
    aside = directory / layout.ASIDE_FOLDER
    aside.mkdir(exist_ok=True)
    place = aside / f"{layout.folder_name(step)}.segment-{segment}"
    if not folder.exists():
        return
    if place.exists():  # moved before, and written once more by the same segment
        shutil.rmtree(place)
    folder.rename(place)
    fsync_dir(aside)
    fsync_dir(directory)


def remove_aside(directory: Path) -> None:
    """Delete everything that was set aside."""
    aside = directory / layout.ASIDE_FOLDER
    if aside.is_dir():
        logger.info("removing %s: the run has got past what its checkpoints were abandoned for", aside)
        shutil.rmtree(aside)


def remove_leftovers(directory: Path) -> list[str]:
    """Delete what killed writers and killed deletions left; only while nothing writes there. Returns the names."""
    names = []
    for path in layout.leftovers(directory):
        logger.info("removing %s, left by a writer that was killed", path)
        shutil.rmtree(path)
        names.append(path.name)
    return names
