"""Task: the closing table of a run, as `summary.json`, as an artifact and as text."""

from __future__ import annotations

from prefect import task

from dflash.records import RunSummary
from dflash.stages import closing_text, reopen_run, summarise_stage
from tasks.policies import NEVER_CACHED, SHORT_TIMEOUT_S, is_transient
from tasks.reporting import markdown


@task(
    name="summarise",
    retries=2,
    retry_delay_seconds=5,
    retry_condition_fn=is_transient,
    timeout_seconds=SHORT_TIMEOUT_S,
    **NEVER_CACHED,
)
def summarise_run(run_dir: str) -> RunSummary:
    """Gather what the stages left in the run's folder; writing `summary.json` marks the run as finished."""
    run = reopen_run(run_dir)
    summary = summarise_stage(run)
    headline = f"{summary.run}: acceptance length {summary.acceptance_length:.2f}, health {summary.health_verdict}"
    markdown("summary", f"```\n{closing_text(run, summary)}\n```\n", description=headline)
    return summary


def closing_table(run_dir: str, summary: RunSummary) -> str:
    """The closing table as text for a terminal."""
    return closing_text(reopen_run(run_dir), summary)
