"""Task: the order and the make-up of every batch of the run."""

from __future__ import annotations

from prefect import task

from dflash.stages import DataStage, PlanStage, PlanView, plan_stage, reopen_run, view_plan
from tasks.policies import NEVER_CACHED, SHORT_TIMEOUT_S, is_transient
from tasks.reporting import picture, table


@task(
    name="plan-batches",
    retries=2,
    retry_delay_seconds=10,
    retry_condition_fn=is_transient,
    timeout_seconds=SHORT_TIMEOUT_S,
    **NEVER_CACHED,
)
def plan_batches(run_dir: str, data: DataStage) -> PlanStage:
    """Pack the batch plan, or keep the one the run has."""
    run = reopen_run(run_dir)
    plan = plan_stage(run, data)
    manifest = plan.manifest
    row = {
        "batches": manifest.batches,
        "epochs": manifest.epochs,
        "padding efficiency": round(manifest.padding_efficiency, 4),
        "longest bucket run": manifest.longest_bucket_run,
        "padded lengths": len(manifest.padded_lengths_tokens),
        "plan": manifest.plan_sha256[:16],
    }
    table("plan", [row], description=f"batch plan {'reused' if plan.reused else 'packed'}; {manifest.bucket_run_note}".rstrip("; "))
    _show(view_plan(run, data))
    return plan


def _show(view: PlanView) -> None:
    rows = [
        {
            "bucket": bucket.bucket,
            "up to tokens": bucket.edge_tokens,
            "samples": bucket.samples,
            "tokens": bucket.tokens,
            "batches": bucket.batches,
            "padding": f"{1 - bucket.efficiency:.1%}",
            "share of the batches": f"{bucket.batch_share:.1%}",
            "longest run": bucket.longest_run,
        }
        for bucket in view.stats.buckets
    ]
    table("plan-buckets", rows, description="buckets in one epoch of the batch plan")
    picture("plan-picture", view.png, kept_in=view.file, description="one epoch of the batch plan")
