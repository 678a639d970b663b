"""Task: runs side by side."""

from __future__ import annotations

from pathlib import Path

from prefect import task

from dflash.stages import compare_stage
from tasks.policies import NEVER_CACHED, SHORT_TIMEOUT_S
from tasks.reporting import link, markdown


@task(name="compare", timeout_seconds=SHORT_TIMEOUT_S, **NEVER_CACHED)
def compare_runs(run_dirs: list[str], output: str | None = None) -> str:
    """The verdict and the tables; the page is written, linked and copied to MLflow."""
    found = compare_stage(run_dirs, output=None if output is None else Path(output), track=True)
    markdown("comparison", f"```\n{found.text}\n```\n", description=f"{len(run_dirs)} runs compared")
    link("comparison-page", str(found.page.resolve()), description="Verdict, curves, acceptance, differences")
    return found.text
