"""Task: conversations, answered by the target, as length-bucketed tokens."""

from __future__ import annotations

from prefect import task

from dflash.stages import DataStage, prepare_stage, reopen_run
from tasks.policies import NEVER_CACHED, PREPARE_TIMEOUT_S, is_transient
from tasks.progress import ProgressReport
from tasks.reporting import table


@task(
    name="prepare-data",
    retries=2,
    retry_delay_seconds=10,
    retry_condition_fn=is_transient,
    timeout_seconds=PREPARE_TIMEOUT_S,
    tags=["dflash"],
    **NEVER_CACHED,
)
def prepare_data(run_dir: str) -> DataStage:
    """Build the run's data set, or find the identical one; answers already written are kept, so a retry goes on."""
    with ProgressReport("data-progress") as progress:
        data = prepare_stage(reopen_run(run_dir), progress=progress)
    rows = [{"bucket": bucket, "samples": count} for bucket, count in enumerate(data.samples_per_bucket)]
    state = "reused" if data.reused else "built"
    table("data", rows, description=f"data set {state}: {data.samples} samples, {data.tokens} tokens in {data.dir}")
    return data
