"""Which checkpoint a run continues from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from dflash.checkpoint.layout import folder_name, list_checkpoints
from dflash.checkpoint.load import read_manifest
from dflash.errors import CheckpointError
from dflash.records import LedgerEntry, SavedState

logger = logging.getLogger(__name__)


def newest_durable(directory: Path, current: Mapping[int, LedgerEntry]) -> int | None:
    """Newest complete checkpoint that the ledger does not call bad; None if there is none.

    Args:
        directory: folder of the checkpoints.
        current: last ledger entry of every step. A folder that the ledger does not know yet counts: the rename that
            gave it its name is the commit, and a supervisor may have died before noting it.
    """
    usable = [step for step in list_checkpoints(directory) if step not in current or current[step].state != "bad"]
    return max(usable, default=None)


def saved_states(directory: Path) -> dict[int, SavedState]:
    """Complete checkpoints in place with a readable manifest, by step; contents are not verified."""
    states = {}
    for step in list_checkpoints(directory):
        try:
            manifest = read_manifest(directory / folder_name(step))
        except CheckpointError as error:
            logger.warning("checkpoint step-%d is left out: %s", step, error.what)
            continue
        states[step] = SavedState(segment=manifest.segment, plan_position=manifest.plan_position)
    return states
