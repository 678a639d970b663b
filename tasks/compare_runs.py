"""Task: finished runs side by side."""

from __future__ import annotations

from prefect import task

from dflash.evaluate.compare import compare_summaries
from dflash.stages import load_summary
from tasks.policies import NEVER_CACHED, SHORT_TIMEOUT_S
from tasks.reporting import markdown


@task(name="compare", timeout_seconds=SHORT_TIMEOUT_S, tags=["dflash"], **NEVER_CACHED)
def compare_runs(run_dirs: list[str]) -> str:
    """One table of several runs' summaries."""
    text = compare_summaries([load_summary(run_dir) for run_dir in run_dirs]).text
    markdown("comparison", f"```\n{text}\n```\n", description=f"{len(run_dirs)} runs compared")
    return text
