"""Automations on the Prefect server: installed once, brought up to date by every further call.

A flow run whose machine or process dies cannot say so, and stays `Running` for ever. Flow runs send a heartbeat every 30 s
(`prefect.toml`); one that falls silent is marked as crashed. That ends nothing: the training's own watch takes a false report
back, and the scheduled health check starts a run that has really died again.
"""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta

from prefect.automations import Automation
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from flows.selection import SELECTION, selection_automation
from tasks.local import require_server, run_program

ZOMBIES = "dflash: flow runs without a heartbeat"
HEARTBEAT = "prefect.flow-run.heartbeat"
SILENCE_S = 90
"""Three heartbeats, which are 30 s apart at the least."""


def zombie_automation(silence_s: int) -> Automation:
    """Marks a flow run as crashed that has sent a heartbeat and then neither another nor its end for `silence_s` seconds."""
    ends = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")}
    return Automation(
        name=ZOMBIES,
        description="Installed by `make automations`.",
        trigger=EventTrigger(
            after={HEARTBEAT},
            expect={HEARTBEAT} | ends,
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=silence_s),
        ),
        actions=[
            ChangeFlowRunState(state=StateType.CRASHED, name="Crashed", message=f"no heartbeat for {silence_s} s", force=False)
        ],
    )


def install(wanted: Automation) -> str:
    """Create an automation, or bring the one of that name up to date; returns what was done."""
    try:
        known = Automation.read(name=wanted.name)
    except ValueError:
        wanted.create()
        return f"created: {wanted.name}"
    wanted.id = known.id
    wanted.update()
    return f"up to date: {wanted.name}"


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Install the automations on the Prefect server.")
    parser.add_argument("--silence", type=int, default=SILENCE_S, metavar="SECONDS", help="silence that counts as death")
    arguments = parser.parse_args()

    def body() -> None:
        print(install(zombie_automation(arguments.silence)))
        selection = selection_automation()
        print(f"left out: {SELECTION} (first: prefect deploy --all)" if selection is None else install(selection))

    return run_program(body, check=require_server)


if __name__ == "__main__":
    sys.exit(main())
