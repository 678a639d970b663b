"""One drill from its beginning to its verdict, whoever runs the flows.

Invariant: the drill touches the run in two ways only, the fault and the blow; everything else it learns from files and from the
states of flow runs. The hard decision: it ends when nobody works on the run any more, so a run that is started again by the
health check after a kill is followed into its next flow run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dflash.config import Config
from dflash.drill.blows import corrupt_newest_and_kill, kill_trainer
from dflash.drill.facts import COMPLETED, DrillFacts, gather
from dflash.drill.faults import Fault, plan_fault
from dflash.drill.timeline import Moment, Timeline
from dflash.drill.watch import RunWatch
from dflash.errors import RunStateError
from dflash.records import RunPaths, to_json
from dflash.storage import atomic_write_text

POLL_S = 0.25
PROGRESS_EVERY_S = 15.0
BLOW_AFTER_STEPS = 10
REVIVAL_S = 150.0
"""Longest wait for a new flow run after one that did not complete because of a blow."""


@dataclass(frozen=True, slots=True)
class FlowRun:
    """A flow run of the training.

    Attributes:
        state: name of its state in Prefect.
        final: whether that is the last one.
    """

    name: str
    state: str
    final: bool


class Stage(Protocol):
    """Where the flows run."""

    def start(self) -> None:
        """Start the training."""

    def flow_runs(self) -> Sequence[FlowRun]:
        """Flow runs of the training since then, oldest first."""

    def kill_worker(self) -> None:
        """Kill the worker and what it runs, then start a worker again."""


@dataclass(frozen=True, slots=True)
class DrillRun:
    """A drill that is over."""

    paths: RunPaths
    facts: DrillFacts


class Conductor:
    """Conducts one drill.

    Args:
        config: of the run; its name belongs to this drill alone.
        fault: to be planted.
        stage: where the flows run.
        timeline: what is shown.
        limit_s: longest time.
    """

    def __init__(self, config: Config, fault: Fault, *, stage: Stage, timeline: Timeline, limit_s: float) -> None:
        self._config = config
        self._fault = fault
        self._stage = stage
        self._timeline = timeline
        self._deadline_s = time.monotonic() + limit_s
        self._limit_s = limit_s
        self._plan = plan_fault(fault, config)
        self._paths = RunPaths(Path(config.run.root) / f"{config.run.name}-001")
        self._watch = RunWatch(self._paths)
        self._states: dict[int, str] = {}
        self._hit: int | None = None
        self._struck: int | None = None
        self._progress_s = self._stopped_s = 0.0
        self._shown_step = -1

    def conduct(self) -> DrillRun:
        """Start the training, plant the fault, watch until nobody works on the run any more.

        Raises:
            RunStateError: that takes too long.
        """
        if self._paths.root.exists():
            raise RunStateError(f"{self._paths.root} exists", remedy="use another run.name for the drill")
        self._stage.start()
        self._await(self._paths.config.is_file, "the beginning of the run")
        if self._fault.name != "none":
            self._paths.control_dir.mkdir(exist_ok=True)
            atomic_write_text(self._paths.planted_fault, to_json(self._plan, indent=2) + "\n")
        self._say(f"run {self._paths.root.name} begins; the fault is prepared for step {self._plan.step}")
        self._await(self._is_over, "the end of the run")
        runs = self._stage.flow_runs()
        ended = next((run.state for run in runs if run.state == COMPLETED), runs[-1].state)
        facts = gather(self._paths, self._plan, ended=ended, struck_step=self._struck, hit_checkpoint=self._hit)
        return DrillRun(self._paths, facts)

    def _await(self, over: Callable[[], bool], what: str) -> None:
        while not over():
            if time.monotonic() > self._deadline_s:
                raise RunStateError(
                    f"{what} did not come within {self._limit_s:.0f} s",
                    remedy=f"look into {self._paths.root} and the workers' logs",
                )
            time.sleep(POLL_S)

    def _is_over(self) -> bool:
        for moment in self._watch.poll():
            self._timeline.add(moment)
        self._show_progress()
        self._strike()
        runs = self._stage.flow_runs()
        for number, run in enumerate(runs):  # a flow run gets its own name only once it runs
            if self._states.get(number) != run.state:
                self._states[number] = run.state
                self._say(f"Prefect: flow run {run.name} is {run.state}")
        if any(not run.final for run in runs) or not runs:
            self._stopped_s = 0.0
            return False
        if self._struck is not None and all(run.state != COMPLETED for run in runs):
            # The health check may start the training again; nobody else would.
            self._stopped_s = self._stopped_s or time.monotonic()
            return time.monotonic() - self._stopped_s > REVIVAL_S
        for moment in self._watch.poll():
            self._timeline.add(moment)
        return True

    def _strike(self) -> None:
        """The drill's own part, once the run has come to the fault's step."""
        due = self._watch.step >= self._plan.step + BLOW_AFTER_STEPS and (self._watch.durable or 0) >= self._plan.step
        if self._struck is not None or self._fault.blow is None or not due:
            return
        self._struck = self._watch.step
        match self._fault.blow:
            case "kill-trainer":
                self._say("DRILL: kill -9 of the trainer", step=self._watch.step)
                kill_trainer(self._paths)
            case "corrupt-and-kill-trainer":
                self._hit = corrupt_newest_and_kill(self._paths)
                self._say(f"DRILL: bytes of step-{self._hit} flipped, kill -9 of the trainer", step=self._watch.step)
            case "kill-worker":
                self._say("DRILL: kill -9 of the worker and its flow run; a new worker starts", step=self._watch.step)
                self._stage.kill_worker()

    def _show_progress(self) -> None:
        now_s, loss, step = time.monotonic(), self._watch.loss, self._watch.step
        if loss is not None and step != self._shown_step and now_s - self._progress_s >= PROGRESS_EVERY_S:
            self._progress_s, self._shown_step = now_s, step
            self._say(f"training, loss {loss:.2f}", step=step)

    def _say(self, text: str, *, step: int | None = None) -> None:
        self._timeline.add(Moment(time.time(), step, text))
