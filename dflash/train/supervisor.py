"""The supervisor: one per run, keeps a trainer process going until the plan is done, and executes requests.

Invariant: it alone starts trainers and writes the ledger of its run (it holds the run's lock); a trainer is only ever
started from the newest checkpoint that verifies; an error of the package is raised, a dead process is restarted, and a
stop or a halt is neither.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from dflash.checkpoint import Evidence, read_state, remove_leftovers
from dflash.config import Config
from dflash.data.plan_file import read_plan_manifest
from dflash.errors import HaltedError, InterruptedRunError, NonFiniteLimitError, StorageError, TrainerCrashedError
from dflash.records import ControlRequest, RunPaths
from dflash.train.book import CheckpointBook
from dflash.train.child import TICK_S, TrainerProcess
from dflash.train.device_lock import hold_devices
from dflash.train.doctor import check_devices
from dflash.train.follow import LogFollower
from dflash.train.go_back import Rollbacks
from dflash.train.heartbeat import Heart
from dflash.train.mirror import open_mirror
from dflash.train.outcome import error_of, read_exit
from dflash.train.probes import ProbeReader
from dflash.train.processes import STOP_GRACE_S, end_recorded
from dflash.train.requests import acknowledge, pending_requests
from dflash.train.restarts import RestartBudget, StallWatch
from dflash.train.runs import hold_run

logger = logging.getLogger(__name__)

CriticalSpans = Callable[[], tuple[tuple[int, int], ...]]
"""Checks the log up to now and returns (onset, last record step) of its critical training findings."""

_CRASH_LINES = 15
_SETTLED_NS = 1_000_000_000
_LOOKS = 3
"""The second look finds what came during the first one, and is quick."""

_COPY_AFTER_ERROR_S = 1.0
"""A run that was stopped or failed does not keep its caller waiting for the store."""


@dataclass(frozen=True, slots=True)
class TrainOutcome:
    """A finished training.

    Attributes:
        train_time_s: summed time of the steps that count.
        wait_frac: share of it that the drafter waited for features.
        checkpoint_step: the last checkpoint.
        restarts: times that a dead trainer was started again.
        rollbacks: times that the run went back to a clean checkpoint, in its whole life.

    """

    steps: int
    train_time_s: float
    wait_frac: float
    checkpoint_step: int
    restarts: int
    rollbacks: int


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
        DeviceError: the machine lacks devices, or another training uses them.
        HaltedError: a halt was requested.
        InterruptedRunError: a stop was requested, by a file or a signal; the state is saved.
        NonFiniteLimitError: too many updates in a row were not finite.
        TrainerCrashedError: the trainer died more often than it may be started again.
        DflashError: the trainer's own error.
    """
    check_devices(config)
    with hold_run(paths), hold_devices(config.cluster, run=str(paths.root)):
        supervisor = _Supervisor(config, paths, on_tick, critical_spans)
        with _signals_to(supervisor.on_signal):
            try:
                outcome = supervisor.run()
            except BaseException:
                supervisor.close(wait_s=_COPY_AFTER_ERROR_S)
                raise
            supervisor.close(wait_s=config.checkpoint.upload_wait_s)
            return outcome


class _Supervisor:
    def __init__(self, config: Config, paths: RunPaths, on_tick: Callable[[], None], critical_spans: CriticalSpans) -> None:
        self._config = config
        self._paths = paths
        self._on_tick = on_tick
        self._critical_spans = critical_spans
        self._book = CheckpointBook(paths, config.checkpoint, config.rollback)
        self._probes = ProbeReader(paths, config, self._book)
        self._follower = LogFollower(paths.log)
        self._rollbacks = Rollbacks(paths, self._book, newest_segment=self._newest_segment)
        self._batches = read_plan_manifest(paths.plan_dir).batches
        self._restarts = RestartBudget(config.train)
        self._signal: int | None = None
        self._heart = Heart(paths, every_s=config.train.heartbeat_s)
        self._reconciled_at_ns: int | None = None
        self._trouble = ""
        self._mirror = open_mirror(paths, config.checkpoint, on_object=lambda _name: None)

    def close(self, *, wait_s: float) -> None:
        """End the copying of checkpoints, giving the newest one some time."""
        if self._mirror is not None:
            self._mirror.notice()
            if not self._mirror.close(timeout_s=wait_s):
                logger.warning("the newest checkpoint is not in %s", self._config.checkpoint.store)

    def on_signal(self, number: int) -> None:
        """Remember a signal; the next tick obeys it."""
        self._signal = number

    def run(self) -> TrainOutcome:
        """Start trainers until one finishes."""
        self._beat()
        end_recorded(self._paths, grace_s=STOP_GRACE_S)
        remove_leftovers(self._paths.checkpoints_dir)
        while True:
            self._follower.poll()
            self._settle(None)
            resume_step = self._book.newest_verified()
            if resume_step is not None and self._is_finished(resume_step):
                self._await_probes()
                if self._judge(ended=True):
                    self._on_tick()
                if not self._rollbacks.pending():
                    break
                continue
            self._raise_requested()
            if self._restarts.spent:
                raise _crashed(self._restarts.in_row, self._paths)
            self._wait(self._restarts.wait_s)
            if self._train(resume_step):
                self._restarts.crashed(end=self._follower.end)
        return TrainOutcome(
            steps=resume_step,
            train_time_s=self._follower.train_time_s(),
            wait_frac=self._follower.wait_frac(),
            checkpoint_step=resume_step,
            restarts=self._restarts.total,
            rollbacks=self._rollbacks.done(),
        )

    def _train(self, resume_step: int | None) -> bool:
        """Run one trainer to its end, whether it finishes, dies, or is stopped for a rollback.

        Returns:
            Whether it died.

        Raises:
            DflashError: the trainer's own error, or a request to end it.
        """
        segment = self._next_segment()
        start = "the beginning" if resume_step is None else f"checkpoint step-{resume_step}"
        logger.info("starting the trainer: segment %d, from %s", segment, start)
        process = TrainerProcess(self._config, self._paths, segment=segment, resume_step=resume_step)
        progress = StallWatch(self._config.train.stall_s, now_s=time.monotonic())
        try:
            while not process.wait_tick():
                self._tick()
                if progress.stalls(self._follower.end, now_s=time.monotonic()):
                    logger.error("no step for %.0f s: ending the trainer, to start it again", self._config.train.stall_s)
                    process.end(on_wait=self._beat)
                    return True
                with self._disk_may_fail():
                    if self._settle(process):
                        return False
                self._raise_requested(process)
        except BaseException:
            process.end(on_wait=self._beat)
            raise
        process.end_orphans(grace_s=STOP_GRACE_S)
        self._tick()
        ended = read_exit(self._paths, segment=segment)
        if ended is None:
            logger.warning("the trainer died (torchrun ended with %s): see %s", process.returncode, self._paths.trainer_output)
            return True
        error = error_of(ended)
        if isinstance(error, NonFiniteLimitError) and self._will_roll_back():
            return False
        if isinstance(error, InterruptedRunError):
            logger.warning("the trainer was stopped by someone else, after saving its state")
            return True
        if error is not None:
            raise error
        return False

    def _settle(self, process: TrainerProcess | None) -> bool:
        """Carry out what the health check decided; returns whether the trainer was stopped for it.

        Raises:
            HaltedError: the decision was, or had been, to halt.
        """
        stop = None if process is None else lambda: process.end(on_wait=self._beat)
        stopped = self._rollbacks.settle(stop_trainer=stop, learn=self._learn_what_is_clean)
        plan = self._rollbacks.halt()
        if plan is not None:
            raise _halted(self._paths, by="the health check", reason=plan.reason)
        if stopped:
            self._follower.poll()
        return stopped

    def _will_roll_back(self) -> bool:
        """Let the health check see the end of a trainer that gave up; whether it has decided on a way on."""
        self._follower.poll()
        # First what is clean, then what to do: a decision made before would go back further than it has to.
        self._judge(ended=False)
        self._critical_spans()
        self._on_tick()
        return self._rollbacks.pending()

    def _newest_segment(self) -> int:
        logged = -1 if self._follower.last_segment is None else self._follower.last_segment
        return max(logged, self._book.last_segment)

    def _next_segment(self) -> int:
        return self._newest_segment() + 1

    def _tick(self) -> None:
        self._beat()
        with self._disk_may_fail():
            self._follower.poll()
            if self._probes.poll():
                self._book.reconsider()
            self._learn_what_is_clean()
            if self._mirror is not None:
                self._mirror.notice()
            self._on_tick()

    def _learn_what_is_clean(self) -> None:
        """Note and judge the checkpoints until none is due any more.

        A look may take seconds in which the training goes on: a decision made right behind the first one would know the newest log
        and not the newest checkpoints, and go back further than it has to.
        """
        for _ in range(_LOOKS):
            if not self._reconciled() and not self._book.is_due(records=self._follower.end):
                return
            self._judge(ended=False)
            self._follower.poll()

    def _reconciled(self) -> bool:
        """Reconcile if the folder of checkpoints has changed; returns whether there was a new one."""
        changed_at_ns = self._paths.checkpoints_dir.stat().st_mtime_ns
        if changed_at_ns == self._reconciled_at_ns:
            return False
        found = self._book.reconcile()
        # A younger time may not be the last of its clock tick.
        self._reconciled_at_ns = changed_at_ns if time.time_ns() - changed_at_ns > _SETTLED_NS else None
        return found

    def _judge(self, *, ended: bool) -> bool:
        """Judge the checkpoints that are due, and let go of what retention lets go; returns whether the log shows damage."""
        records = self._follower.end
        if not ended and not self._book.is_due(records=records):
            return False
        evidence = Evidence(
            critical_spans=self._critical_spans(),
            judged_records=records,
            coverage_frac=self._follower.coverage_frac,
            min_coverage_frac=self._config.health.min_coverage_frac,
            ended=ended,
            probes=self._probes.view(ended=ended),
        )
        self._book.judge(evidence)
        self._book.prune(spare=self._in_use())
        return bool(evidence.critical_spans)

    def _in_use(self) -> frozenset[int]:
        """Checkpoints that are being copied, or that a request which is not carried out yet wants to go back to."""
        copied = None if self._mirror is None else self._mirror.uploading
        return self._rollbacks.targets() | (frozenset() if copied is None else {copied})

    def _raise_requested(self, process: TrainerProcess | None = None) -> None:
        """Obey the oldest request or a signal: end the trainer, acknowledge, raise."""
        requests = [request for request in pending_requests(self._paths) if request.plan is None]
        if self._signal is None and not requests:
            return
        if process is not None:
            process.end(on_wait=self._beat)
            self._tick()
        for request in requests:
            acknowledge(self._paths, request.key, outcome="the trainer is stopped")
        raise _error_for(self._signal, requests, self._paths)

    def _await_probes(self) -> None:
        """Give the probes that the last verdicts wait for some time: the last one stands in for the rest of its soak."""
        until_s = time.monotonic() + self._config.probe.final_wait_s
        while self._probes.awaits() and time.monotonic() < until_s:
            time.sleep(TICK_S)
            self._tick()
            self._raise_requested()

    def _is_finished(self, step: int) -> bool:
        state = read_state(self._paths.checkpoint(step))
        return state.step >= state.total_steps or state.plan_position >= self._batches

    def _wait(self, seconds: float) -> None:
        """Let time pass before a restart; requests and signals are obeyed meanwhile."""
        if seconds > 0:
            logger.warning("the trainer died %d times in a row: the next start is in %.0f s", self._restarts.in_row, seconds)
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, TICK_S))
            self._beat()
            self._raise_requested()

    @contextlib.contextmanager
    def _disk_may_fail(self) -> Iterator[None]:
        """Let a full or failing disk cost what the block wanted to write, and never the training: the next tick tries again."""
        try:
            yield
        except (OSError, StorageError) as error:
            if str(error) != self._trouble:
                logger.error("the supervisor cannot do its bookkeeping, training goes on: %s", error)
            self._trouble = str(error)
        else:
            self._trouble = ""

    def _beat(self) -> None:
        if self._heart.is_due():
            with self._disk_may_fail():
                self._heart.beat()


def _error_for(number: int | None, requests: list[ControlRequest], paths: RunPaths) -> HaltedError | InterruptedRunError:
    for request in requests:
        if request.action == "halt":
            return _halted(paths, by=request.requested_by, reason=request.reason)
    cause = f"{requests[0].requested_by}: {requests[0].reason}" if requests else f"signal {number}"
    return InterruptedRunError(
        f"run {paths.root} was stopped by {cause}", remedy="start it again to continue from its last checkpoint"
    )


def _halted(paths: RunPaths, *, by: str, reason: str) -> HaltedError:
    """The error of a run that is not to be continued."""
    return HaltedError(
        f"run {paths.root} was halted by {by}: {reason}",
        remedy=f"read {paths.health_dir / 'report.html'}; do not continue this run before the cause is known",
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
