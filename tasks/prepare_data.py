"""Task: conversations, answered by the target, as length-bucketed tokens."""

from __future__ import annotations

from prefect import task

from dflash.stages import DataStage, prepare_stage, reopen_run, spread_stage
from tasks.policies import NEVER_CACHED, PREPARE_TIMEOUT_S, is_transient
from tasks.progress import ProgressReport
from tasks.reporting import link, table
from tasks.spread import open_spread


@task(
    name="prepare-data",
    retries=2,
    retry_delay_seconds=10,
    retry_condition_fn=is_transient,
    timeout_seconds=PREPARE_TIMEOUT_S,
    **NEVER_CACHED,
)
def prepare_data(run_dir: str) -> DataStage:
    """Build the run's data set, or find the identical one; what is finished is kept, so a retry goes on."""
    run = reopen_run(run_dir)
    with ProgressReport("data-progress") as progress:
        if run.config.data.runner == "local":
            data = prepare_stage(run, progress=progress)
        else:
            with open_spread(run.config.data) as spread:
                data = spread_stage(run, spread=spread, progress=progress)
    _report(data)
    return data


def _report(data: DataStage) -> None:
    rows = [
        {
            "bucket": bucket.bucket,
            "up to tokens": bucket.upper_edge_tokens,
            "samples": bucket.samples,
            "tokens": bucket.tokens,
            "supervised tokens": bucket.supervised_tokens,
            "padding to the edge": _frac(bucket.samples * bucket.upper_edge_tokens - bucket.tokens, bucket.tokens),
        }
        for bucket in data.buckets
    ]
    state = "reused" if data.reused else "built"
    set_aside = f"; rows set aside: {data.quarantined}" if data.quarantined else ""
    table("data", rows, description=f"data set {state}: {data.samples} samples, {data.tokens} tokens in {data.location}{set_aside}")
    link("data-preview", data.preview, description="samples of every bucket, their supervised tokens coloured")


def _frac(padding_tokens: int, tokens: int) -> str:
    """Share of padding if every sample were padded to its bucket's edge; the plan pads far less."""
    return f"{padding_tokens / max(1, padding_tokens + tokens):.1%}"
