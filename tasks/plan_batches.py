"""Task: the order and the make-up of every batch of the run."""

from __future__ import annotations

from prefect import task

from dflash.stages import DataStage, PlanStage, plan_stage, reopen_run
from tasks.policies import NEVER_CACHED, SHORT_TIMEOUT_S, is_transient
from tasks.reporting import table


@task(
    name="plan-batches",
    retries=2,
    retry_delay_seconds=10,
    retry_condition_fn=is_transient,
    timeout_seconds=SHORT_TIMEOUT_S,
    tags=["dflash"],
    **NEVER_CACHED,
)
def plan_batches(run_dir: str, data: DataStage) -> PlanStage:
    """Pack the batch plan, or keep the one the run has."""
    plan = plan_stage(reopen_run(run_dir), data)
    manifest = plan.manifest
    row = {
        "batches": manifest.batches,
        "epochs": manifest.epochs,
        "padding efficiency": round(manifest.padding_efficiency, 4),
        "longest bucket run": manifest.longest_bucket_run,
        "plan": manifest.plan_sha256[:16],
    }
    table("plan", [row], description=f"batch plan {'reused' if plan.reused else 'packed'}")
    return plan
