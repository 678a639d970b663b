"""Plans on disk, for tests that need one without a run, and places in them."""

from __future__ import annotations

from pathlib import Path

from dflash.data.plan import BatchPlan
from dflash.data.plan_file import PlanWriter


def write_plan(plan: BatchPlan, plan_dir: Path) -> None:
    """Write a plan that is in memory."""
    writer = PlanWriter(plan_dir)
    for arrays in plan.epochs:
        writer.add(arrays)
    writer.finish(plan.manifest)


def positions_of_epoch(plan: BatchPlan, epoch: int) -> range:
    """All positions of an epoch."""
    first = sum(len(arrays) for arrays in plan.epochs[:epoch])
    return range(first, first + len(plan.epochs[epoch]))
