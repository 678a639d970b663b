"""Which checkpoint a run continues from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dflash.checkpoint.layout import list_checkpoints
from dflash.records import LedgerEntry


def newest_durable(directory: Path, current: Mapping[int, LedgerEntry]) -> int | None:
    """Newest complete checkpoint that the ledger does not call bad; None if there is none.

    Args:
        directory: folder of the checkpoints.
        current: last ledger entry of every step. A folder that the ledger does not know yet counts: the rename that
            gave it its name is the commit, and a supervisor may have died before noting it.
    """
    usable = [step for step in list_checkpoints(directory) if step not in current or current[step].state != "bad"]
    return max(usable, default=None)
