"""Plans on disk, for tests that need one without a run."""

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
