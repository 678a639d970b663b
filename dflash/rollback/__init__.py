"""When and how a damaged run returns to a clean checkpoint: pure functions of the ledger, no clock, no files.

`decide` says what should happen, `next_action` what a supervisor does next to make it so. Both see only facts that
survive a crash, so whoever dies, whoever comes next goes on where the last durable fact says.
"""

from dflash.rollback.execution import (
    Acknowledge,
    Action,
    Facts,
    MoveAside,
    NoteCheckpoint,
    NoteRollback,
    StopTrainer,
    VerifyTarget,
    next_action,
)
from dflash.rollback.ladder import Situation, decide
from dflash.rollback.overlay import lr_factor, overlay_in_force
from dflash.rollback.regions import Region, open_regions
from dflash.rollback.skips import merged, skips_in_force

__all__ = [
    "Acknowledge",
    "Action",
    "Facts",
    "MoveAside",
    "NoteCheckpoint",
    "NoteRollback",
    "Region",
    "Situation",
    "StopTrainer",
    "VerifyTarget",
    "decide",
    "lr_factor",
    "merged",
    "next_action",
    "open_regions",
    "overlay_in_force",
    "skips_in_force",
]
