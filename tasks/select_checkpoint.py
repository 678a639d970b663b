"""Task: a run's due checkpoints are probed, and the best of them challenges the champion of the registry."""

from __future__ import annotations

import os
from typing import Any, Final

from prefect import task
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task

from dflash.records import ProbeRecord
from dflash.stages import SelectStage, give_way, select_stage
from dflash.tracking.store import StoreUnreachableError
from tasks.policies import EVALUATE_TIMEOUT_S, NEVER_CACHED, is_transient
from tasks.reporting import markdown, table

__all__ = ["give_way", "may_pass", "select_checkpoint"]

STARTED_FOR: Final = "PREFECT__FLOW_RUN_ID"
"""Environment variable of a process that a worker has started for one flow run."""


def may_pass(_task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Whether a failure may go away by itself: a registry that is away for now may, besides files and servers."""
    away = isinstance(state.result(raise_on_failure=False), StoreUnreachableError)
    return away or is_transient(_task, task_run, state)


@task(
    name="select-checkpoint",
    retries=2,
    retry_delay_seconds=60,
    retry_condition_fn=may_pass,
    timeout_seconds=EVALUATE_TIMEOUT_S,
    **NEVER_CACHED,
)
def select_checkpoint(run_dir: str, *, register: bool) -> SelectStage:
    """Probe, choose, register; what was measured and ruled is left as artifacts."""
    if STARTED_FOR in os.environ:
        give_way(run_dir)
    found = select_stage(run_dir, register=register)
    table("probes", [_row(record, best=found.best) for record in found.probes], description=f"probed checkpoints of {run_dir}")
    done = found.registered
    if done is not None:
        place = "is the champion" if done.champion else "is not the champion"
        text = f"**{done.model} version {done.version}** (step-{found.best}) {place}\n\n{done.ruling.reason}\n"
        markdown("champion", text, description=f"step-{found.best} {place}: {done.ruling.reason}")
    return found


def _row(record: ProbeRecord, *, best: int | None) -> dict[str, object]:
    figures = record.figures
    ends = None if figures is None else figures.acceptance_ci
    return {
        "step": record.step,
        "outcome": record.outcome,
        "acceptance length": None if figures is None else round(figures.acceptance_length, 3),
        "interval": record.reason if ends is None else "{:.3f} to {:.3f}".format(*ends),
        "best": "best" if record.step == best and figures is not None else "",
    }
