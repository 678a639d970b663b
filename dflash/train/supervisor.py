"""The supervisor: one per run, keeps a trainer process going until the plan is done, and executes requests.

Invariant: it alone starts trainers and writes the ledger of its run (it holds the run's lock); a trainer is only ever
started from the newest checkpoint that verifies; an error of the package is raised, a dead process is restarted, and a
stop or a halt is neither.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from dflash.checkpoint import Evidence, read_state, remove_leftovers
from dflash.config import Config
from dflash.errors import HaltedError, InterruptedRunError, TrainerCrashedError
from dflash.records import ControlRequest, RunPaths
from dflash.storage import atomic_write_text
from dflash.train.book import CheckpointBook
from dflash.train.child import STOP_GRACE_S, TrainerProcess
from dflash.train.doctor import check_devices
from dflash.train.follow import LogFollower
from dflash.train.outcome import error_of, read_exit
from dflash.train.processes import end_recorded, identify
from dflash.train.requests import acknowledge, pending_requests
from dflash.train.runs import hold_run

logger = logging.getLogger(__name__)

CriticalSpans = Callable[[], tuple[tuple[int, int], ...]]
"""Checks the log up to now and returns (onset, last record step) of its critical training findings."""

_CRASH_LINES = 15


@dataclass(frozen=True, slots=True)
class TrainOutcome:
    """A finished training.

    Attributes:
        train_time_s: summed time of the steps that count.
        wait_frac: share of it that the drafter waited for features.
        checkpoint_step: the last checkpoint.
        restarts: times that a dead trainer was started again.

    """

    steps: int
    train_time_s: float
    wait_frac: float
    checkpoint_step: int
    restarts: int


def supervise(config: Config, paths: RunPaths, *, on_tick: Callable[[], None], critical_spans: CriticalSpans) -> TrainOutcome:
    """Train a prepared run to its end.

    Args:
        config: resolved configuration.
        paths: the run's folder, with its plan and data pointer.
        on_tick: called about twice a second while a trainer runs.
        critical_spans: called when a checkpoint has passed its soak, and at the end.

    Returns:
        What the training cost.

    Raises:
        RunStateError: another supervisor trains this run.
        DeviceError: the machine lacks devices.
        HaltedError: a halt was requested.
        InterruptedRunError: a stop was requested, by a file or a signal; the state is saved.
        NonFiniteLimitError: too many updates in a row were not finite.
        TrainerCrashedError: the trainer died more often than it may be started again.
        DflashError: the trainer's own error.
    """
    check_devices(config)
    with hold_run(paths):
        supervisor = _Supervisor(config, paths, on_tick, critical_spans)
        with _signals_to(supervisor.on_signal):
            return supervisor.run()


class _Supervisor:
    def __init__(self, config: Config, paths: RunPaths, on_tick: Callable[[], None], critical_spans: CriticalSpans) -> None:
        self._config = config
        self._paths = paths
        self._on_tick = on_tick
        self._critical_spans = critical_spans
        self._book = CheckpointBook(paths, config.checkpoint)
        self._follower = LogFollower(paths.log)
        self._signal: int | None = None
        self._beat_due_s = 0.0

    def on_signal(self, number: int) -> None:
        """Remember a signal; the next tick obeys it."""
        self._signal = number

    def run(self) -> TrainOutcome:
        """Start trainers until one finishes."""
        self._beat()
        end_recorded(self._paths, grace_s=STOP_GRACE_S)
        remove_leftovers(self._paths.checkpoints_dir)
        launches = 0
        while True:
            self._follower.poll()
            resume_step = self._book.newest_verified()
            if resume_step is not None and self._is_finished(resume_step):
                break
            self._raise_requested()
            if launches > self._config.train.max_restarts:
                raise _crashed(launches, self._paths)
            self._train(resume_step)
            launches += 1
        self._follower.poll()
        self._judge(ended=True)
        return TrainOutcome(
            steps=resume_step,
            train_time_s=self._follower.train_time_s(),
            wait_frac=self._follower.wait_frac(),
            checkpoint_step=resume_step,
            restarts=max(0, launches - 1),
        )

    def _train(self, resume_step: int | None) -> None:
        """Run one trainer to its end, whether it finishes or dies.

        Raises:
            DflashError: the trainer's own error, or a request to end it.
        """
        segment = self._next_segment()
        logger.info("starting the trainer: segment %d, from checkpoint %s", segment, resume_step)
        process = TrainerProcess(self._config, self._paths, segment=segment, resume_step=resume_step)
        try:
            while not process.wait_tick():
                self._tick()
                self._raise_requested(process)
        except BaseException:
            process.end(on_wait=self._beat)
            raise
        process.end_orphans(grace_s=STOP_GRACE_S)
        self._tick()
        ended = read_exit(self._paths, segment=segment)
        if ended is None:
            logger.warning("the trainer died (torchrun ended with %s): see %s", process.returncode, self._paths.trainer_output)
            return
        error = error_of(ended)
        if isinstance(error, InterruptedRunError):
            logger.warning("the trainer was stopped by someone else, after saving its state")
        elif error is not None:
            raise error

    def _next_segment(self) -> int:
        logged = -1 if self._follower.last_segment is None else self._follower.last_segment
        return max(logged, self._book.last_segment) + 1

    def _tick(self) -> None:
        self._beat()
        self._follower.poll()
        if self._book.reconcile() or self._book.is_due(records=self._follower.end):
            self._judge(ended=False)
        self._on_tick()

    def _judge(self, *, ended: bool) -> None:
        records = self._follower.end
        if not ended and not self._book.is_due(records=records):
            return
        evidence = Evidence(
            critical_spans=self._critical_spans(),
            judged_records=records,
            coverage_frac=self._follower.coverage_frac,
            min_coverage_frac=self._config.health.min_coverage_frac,
            ended=ended,
        )
        self._book.judge(evidence)
        self._book.prune()

    def _raise_requested(self, process: TrainerProcess | None = None) -> None:
        """Obey the oldest request or a signal: end the trainer, acknowledge, raise."""
        requests = pending_requests(self._paths)
        if self._signal is None and not requests:
            return
        if process is not None:
            process.end(on_wait=self._beat)
            self._tick()
        for request in requests:
            acknowledge(self._paths, request.key, outcome="the trainer is stopped")
        raise _error_for(self._signal, requests, self._paths)

    def _is_finished(self, step: int) -> bool:
        state = read_state(self._paths.checkpoint(step))
        return state.step >= state.total_steps

    def _beat(self) -> None:
        if time.monotonic() < self._beat_due_s:
            return
        me = identify(os.getpid(), role="supervisor")
        beat = {"pid": os.getpid(), "start_time": None if me is None else me.start_ticks, "at": time.time()}
        atomic_write_text(self._paths.heartbeat, json.dumps(beat) + "\n")
        self._beat_due_s = time.monotonic() + self._config.train.heartbeat_s


def _error_for(number: int | None, requests: list[ControlRequest], paths: RunPaths) -> HaltedError | InterruptedRunError:
    for request in requests:
        if request.action == "halt":
            return HaltedError(
                f"run {paths.root} was halted by {request.requested_by}: {request.reason}",
                remedy=f"read {paths.health_dir / 'report.html'}; do not continue this run before the cause is known",
            )
    cause = f"{requests[0].requested_by}: {requests[0].reason}" if requests else f"signal {number}"
    return InterruptedRunError(
        f"run {paths.root} was stopped by {cause}", remedy="start it again to continue from its last checkpoint"
    )


def _crashed(launches: int, paths: RunPaths) -> TrainerCrashedError:
    return TrainerCrashedError(
        f"the trainer died, and {launches - 1} restarts did not help; the end of its output:\n{_last_lines(paths)}",
        remedy=f"see {paths.trainer_output}; a new start continues from the newest durable checkpoint",
    )


def _last_lines(paths: RunPaths) -> str:
    if not paths.trainer_output.is_file():
        return "(none)"
    lines = paths.trainer_output.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-_CRASH_LINES:])


@contextlib.contextmanager
def _signals_to(receive: Callable[[int], None]) -> Iterator[None]:
    """Send SIGTERM and SIGINT to `receive`; only possible on the main thread, elsewhere nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        receive(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
