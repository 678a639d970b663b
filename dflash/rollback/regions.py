"""Regions: stretches of the run that keep failing, with the rollbacks spent on each.

A region is everything within `region_steps` of its first onset. Only net progress closes it: a checkpoint beyond it
that has become clean after the region's last rollback. Time, restarts and restored states close nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflash.records.checkpoint import LedgerEntry
from dflash.records.rollback import LedgerLine, RollbackEntry

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Region:
    """One open region.

    Attributes:
        first_onset: step that names it.
        rollbacks: begun in it so far.
        last_target: checkpoint that the newest of them returned to.
    """

    first_onset: int
    rollbacks: int
    last_target: int

    def holds(self, step: int, *, region_steps: int) -> bool:
        """Whether an onset belongs to this region."""
        return abs(step - self.first_onset) <= region_steps


def open_regions(ledger: Sequence[LedgerLine], *, region_steps: int) -> tuple[Region, ...]:
    """Regions that no progress has closed, oldest first."""
    regions: dict[int, Region] = {}
    for line in ledger:
        if isinstance(line, LedgerEntry):
            if line.state == "clean":
                regions = {first: region for first, region in regions.items() if line.step <= first + region_steps}
        elif line.phase == "begin":
            first = line.plan.region_step
            spent = regions[first].rollbacks if first in regions else 0
            regions[first] = Region(first, spent + 1, _target(line))
        elif line.phase == "end" and line.plan.region_step in regions:
            # The planned checkpoint may not have verified: what counts is where the run really went back to.
            regions[line.plan.region_step] = replace(regions[line.plan.region_step], last_target=_target(line))
    return tuple(regions.values())


def region_of(step: int, regions: Sequence[Region], *, region_steps: int) -> Region | None:
    """The region that an onset belongs to; the nearest where several could claim it."""
    near = [region for region in regions if region.holds(step, region_steps=region_steps)]
    return min(near, key=lambda region: abs(region.first_onset - step), default=None)


def rollbacks_begun(ledger: Sequence[LedgerLine], *, since_s: float) -> int:
    """Rollbacks begun at or after a wall time."""
    return sum(isinstance(line, RollbackEntry) and line.phase == "begin" and line.at_s >= since_s for line in ledger)


def _target(line: RollbackEntry) -> int:
    return 0 if line.target_step is None else line.target_step
