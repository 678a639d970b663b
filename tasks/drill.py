"""Drills on a running stack: the fault-free run where none is kept, then each fault, then its verdict in words."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dflash.config import Config, load_config
from dflash.drill.conduct import Conductor, DrillRun
from dflash.drill.faults import Fault, fault_named
from dflash.drill.reference import Reference, keep_reference, load_reference
from dflash.drill.timeline import Timeline
from dflash.drill.verdict import Check, judge, verdict_lines
from tasks.drill_prefect import PrefectStage
from tasks.drill_stack import DrillStack, client_of

Write = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Drills:
    """Drills of one configuration on one stack.

    Attributes:
        stack: running servers and workers.
        config: configuration file.
        overrides: on top of it.
        limit_s: longest time of one training.
        write: takes the lines of timeline and verdict.
    """

    stack: DrillStack
    config: str
    overrides: Sequence[str]
    limit_s: float
    write: Write

    def drill(self, name: str, *, seed: int) -> tuple[DrillRun, tuple[Check, ...]]:
        """Plant one fault and judge what happens; `seed` is added to the configuration's.

        A fault-free run is trained before, if none of this configuration and this code is kept.
        """
        fault = fault_named(name)
        reference = self._reference(seed)
        run, config = self.run(fault, seed=seed)
        checks = judge(fault, run.facts, reference, rule=config.checkpoint, check_every_s=config.drill.check_every_s)
        with self._file(config).open("a", encoding="utf-8") as file:
            for line in verdict_lines(fault, checks):
                self.write(line)
                print(line, file=file)
        return run, checks

    def _reference(self, seed: int) -> Reference:
        config = load_config(self.config, overrides=self._settings("reference", seed))
        known = load_reference(self.stack.root, config)
        if known is not None:
            return known
        run, config = self.run(fault_named("none"), seed=seed)
        return keep_reference(self.stack.root, config, run.facts, run=run.paths.root.name)

    def run(self, fault: Fault, *, seed: int) -> tuple[DrillRun, Config]:
        """Plant one fault and watch what happens, without a verdict."""
        settings = self._settings(f"{fault.name}-{datetime.now(UTC):%m%d%H%M%S}", seed)
        config = load_config(self.config, overrides=settings)
        with client_of(self.stack) as client, self._file(config).open("w", encoding="utf-8") as file:

            def write(line: str) -> None:
                self.write(line)
                print(line, file=file, flush=True)

            stage = PrefectStage(self.stack, client, config=self.config, overrides=settings)
            timeline = Timeline(time.time(), write=write)
            timeline.heading(f"drill `{fault.name}`: {fault.says}")
            with stage.health_checks(every_s=config.drill.check_every_s):
                return Conductor(config, fault, stage=stage, timeline=timeline, limit_s=self.limit_s).conduct(), config

    def _settings(self, name: str, seed: int) -> list[str]:
        plain = load_config(self.config, overrides=self.overrides)
        own = [f"run.root={self.stack.root}", f"run.name=drill-{name}", f"run.seed={plain.run.seed + seed}"]
        return [*self.overrides, *own]

    def _file(self, config: Config) -> Path:
        return self.stack.root / f"{config.run.name}.txt"
