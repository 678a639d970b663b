"""Stage 3: train under a supervisor, with the health check and the forwarding to MLflow on its ticks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from dflash.errors import DflashError, InterruptedRunError
from dflash.records import RunPaths
from dflash.stages.health import critical_spans, health_stage
from dflash.stages.probe_watch import ProbeWatch, probe_watch
from dflash.stages.run import Run
from dflash.stages.tracking import description_of, forwarder_of
from dflash.tracking import LogForwarder
from dflash.train.progress import TrainProgress, read_account, read_progress
from dflash.train.supervisor import supervise

logger = logging.getLogger(__name__)

PROGRESS_EVERY_S = 2.0
"""A line of progress is shown every five seconds at the most, and reading it takes a few milliseconds while the log grows."""


@dataclass(frozen=True, slots=True)
class TrainStage:
    """How the training ended.

    Attributes:
        wait_frac: share of step time that the drafter waited for features.
        restarts: times that a crashed trainer was started again.
        rollbacks: times that the run went back to a clean checkpoint.
        stages: who was busy and which side set the pace, in words.

    """

    steps: int
    train_time_s: float
    wait_frac: float
    checkpoint: str
    restarts: int
    rollbacks: int
    stages: str


def train_stage(run: Run, *, on_progress: Callable[[TrainProgress], None]) -> TrainStage:
    """Train to the end of the plan, resuming from the last durable checkpoint if there is one.

    Raises:
        HaltedError: a health decision or a request halted the run.
        NonFiniteLimitError, TrainerCrashedError, InterruptedRunError: see their texts.
    """
    paths = run.paths
    describe = description_of(run)
    forwarder = forwarder_of(run, describe=describe)
    describe(forwarder.tracker)
    try:
        with probe_watch(run) as probes:
            tick = _Tick(run, forwarder, on_progress, probes)
            outcome = supervise(run.config, paths, on_tick=tick, critical_spans=tick.look)
    except DflashError as error:
        forwarder.forward()
        forwarder.tracker.set_tags({"ended_by": type(error).__name__})
        forwarder.tracker.finish("KILLED" if isinstance(error, InterruptedRunError) else "FAILED")
        raise
    forwarder.forward()
    on_progress(read_progress(paths))
    return TrainStage(
        steps=outcome.steps,
        train_time_s=outcome.train_time_s,
        wait_frac=outcome.wait_frac,
        checkpoint=str(paths.checkpoint(outcome.checkpoint_step)),
        restarts=outcome.restarts,
        rollbacks=outcome.rollbacks,
        stages=_stages_text(paths),
    )


def _stages_text(paths: RunPaths) -> str:
    busy, advice = read_account(paths)
    return f"busy: {', '.join(f'{stage} {share:.0%}' for stage, share in busy.items())}; {advice}" if busy else ""


class _Tick:
    """What happens about once a second while the trainer runs; none of it can slow the trainer."""

    def __init__(self, run: Run, forwarder: LogForwarder, on_progress: Callable[[TrainProgress], None], probes: ProbeWatch) -> None:
        self._run = run
        self._forwarder = forwarder
        self._on_progress = on_progress
        self._probes = probes
        self._next_progress_s = 0.0
        self._next_check_s = time.monotonic() + run.config.health.check_interval_s
        self._seen = False
        """Damage was seen, and the checkpoints have been judged since."""

    def look(self) -> tuple[tuple[int, int], ...]:
        """Evidence for the verdicts on checkpoints; where it shows damage, the next call acts and does not wait for its time."""
        spans = critical_spans(self._run.paths)
        self._seen = self._seen or bool(spans)
        return spans

    def __call__(self) -> None:
        if time.monotonic() >= self._next_progress_s:
            self._on_progress(read_progress(self._run.paths))
            self._next_progress_s = time.monotonic() + PROGRESS_EVERY_S
        self._probes.tick()
        if self._seen or time.monotonic() >= self._next_check_s:
            self.forward()
            # Damage that is seen for the first time waits for one tick, in which the supervisor notes what has become clean.
            report = health_stage(self._run.paths.root, act=self._seen, ended=False)
            self._seen = report.decision is not None and not self._seen
            if report.verdict == "unhealthy":
                logger.warning("health check: %s", report.headline)
            self._next_check_s = time.monotonic() + self._run.config.health.check_interval_s

    def forward(self) -> None:
        self._forwarder.forward()
