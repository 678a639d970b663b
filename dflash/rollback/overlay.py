"""The learning rate after a rollback: an overlay recorded in the ledger, never a changed configuration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dflash.records import LrOverlay
from dflash.records.rollback import LedgerLine, RollbackEntry


def lr_factor(overlay: LrOverlay | None, *, step: int) -> float:
    """Factor on the scheduled learning rate of the update from state `step`; 1 without an overlay or before it."""
    if overlay is None or step < overlay.from_step:
        return 1.0
    done = step - overlay.from_step
    if done >= overlay.rewarm_steps:
        return overlay.cap
    # Starts at rewarm_from and would reach 1; a lower cap cuts the ramp off.
    ramp = overlay.rewarm_from + (1.0 - overlay.rewarm_from) * done / overlay.rewarm_steps
    return min(ramp, overlay.cap)


def overlay_in_force(ledger: Iterable[LedgerLine]) -> LrOverlay | None:
    """The overlay of the newest finished rollback that set one.

    A first-rung rollback elsewhere leaves an earlier cap alone: what was needed to survive is not forgotten.
    """
    overlay = None
    for line in ledger:
        if isinstance(line, RollbackEntry) and line.phase == "end" and line.plan.overlay is not None:
            # An older checkpoint may have had to do: the ramp begins where training really goes on.
            start = line.plan.overlay.from_step if line.target_step is None else line.target_step
            overlay = replace(line.plan.overlay, from_step=start)
    return overlay
