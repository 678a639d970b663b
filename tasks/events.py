"""Events in Prefect, for automations and for the event feed: what was decided about a run, and that it was halted.

Invariant: the id of an event is made of what it tells, so the same decision that two flow runs report is one event. An event that
cannot be sent costs a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from prefect import runtime
from prefect.events import emit_event

from dflash.records import RollbackPlan, RunPaths
from dflash.stages import Revival
from dflash.train.requests import decisions
from tasks.reporting import tolerated

DECISION = "dflash.run.decision"
HALTED = "dflash.run.halted"
DIED = "dflash.run.died"
DUE = "dflash.checkpoint.due"


def decision_event(run: str, plan: RollbackPlan) -> None:
    """A health check has decided on a rollback or a halt."""
    payload = {
        "action": plan.action,
        "reason": plan.reason,
        "rung": plan.rung,
        "onset_step": plan.onset_step,
        "alarm_step": plan.alarm_step,
        "target_step": plan.target_step,
        "skip": [list(part) for part in plan.skip],
    }
    _emit(DECISION, run, plan.key, payload)


def pass_on(paths: RunPaths, told: set[str]) -> None:
    """The same, for every decision that was requested and whose key is not among `told`.

    Those that were carried out between two looks are told too: whoever decided may have died before it could.
    """
    for plan in decisions(paths):
        if plan.key not in told:
            told.add(plan.key)
            decision_event(paths.root.name, plan)


def halted_event(run: str, reason: str) -> None:
    """A run has been halted: nothing goes on before a person has looked."""
    _emit(HALTED, run, reason, {"reason": reason})


def died_event(revival: Revival) -> None:
    """A run's flow has died, and was started again or given up."""
    payload = {"flow_run": revival.flow_run, "continued_by": revival.continued_by, "reason": revival.reason}
    # Not of the flow run alone: one that is retried may die once more.
    _emit(DIED, revival.run, f"{revival.flow_run}/{revival.continued_by}/{revival.reason}", payload)


def due_event(paths: RunPaths, step: int, segment: int) -> None:
    """A durable checkpoint waits for its probe."""
    _emit(DUE, paths.root.name, f"{step}.{segment}", {"run_dir": str(paths.root), "step": step, "segment": segment})


def _emit(event: str, run: str, key: str, payload: Mapping[str, Any]) -> None:
    related = []
    if runtime.flow_run.id is not None:
        related = [{"prefect.resource.id": f"prefect.flow-run.{runtime.flow_run.id}", "prefect.resource.role": "flow-run"}]
    with tolerated(f"event {event}", level=logging.WARNING):
        emit_event(
            event=event,
            resource={"prefect.resource.id": f"dflash.run.{run}", "prefect.resource.name": run},
            occurred=datetime.now(UTC),
            related=related,
            payload=dict(payload),
            id=uuid5(NAMESPACE_URL, f"{event}/{run}/{key}"),
        )
