"""Task: the newest drafter with every block size, temperature and batch size of `evaluate.sweep`."""

from __future__ import annotations

from prefect import task

from dflash.records import SweepResult
from dflash.stages import open_sweep_bench, reopen_run, sweep_stage, sweep_text
from tasks.policies import EVALUATE_TIMEOUT_S, NEVER_CACHED, is_transient
from tasks.progress import ProgressReport
from tasks.reporting import markdown


@task(
    name="sweep",
    retries=1,
    retry_delay_seconds=10,
    retry_condition_fn=is_transient,
    timeout_seconds=EVALUATE_TIMEOUT_S,
    **NEVER_CACHED,
)
def sweep_drafter(run_dir: str) -> SweepResult:
    """Find the setting that decodes fastest on this machine; the table becomes an artifact."""
    run = reopen_run(run_dir)
    with ProgressReport("sweep-progress") as progress:
        result = sweep_stage(run, open_sweep_bench(run), progress=progress)
    markdown("sweep", f"```\n{sweep_text(result)}\n```\n", description=f"decoding speed of {run.name} on this machine")
    return result
