"""Task: which run folder a configuration trains in."""

from __future__ import annotations

from prefect import task

from dflash.config import load_config
from dflash.stages import open_run
from tasks.attempt import note_beginning
from tasks.policies import NEVER_CACHED, SHORT_TIMEOUT_S
from tasks.reporting import markdown


@task(name="open-run", timeout_seconds=SHORT_TIMEOUT_S, **NEVER_CACHED)
def begin_run(config: str, *, overrides: list[str], run_name: str | None) -> str:
    """Validate a configuration and continue its unfinished run, or begin the next; returns the run's folder."""
    named = [*overrides, f"run.name={run_name}"] if run_name else overrides
    run = open_run(load_config(config, overrides=named))
    note_beginning(run.paths)
    state = "continues an unfinished run" if run.resumed else "begins a new run"
    text = f"**{run.name}** {state}\n\n- configuration: `{config}`\n- overrides: `{named}`\n- folder: `{run.paths.root}`\n"
    markdown("run", text, description=f"{run.name}: {state}")
    return str(run.paths.root)
