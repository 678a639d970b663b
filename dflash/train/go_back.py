"""The supervisor's hands in a rollback: gathers the facts, does the next action, asks again.

Invariant: what to do next is decided by `dflash.rollback.next_action` from durable facts; here nothing is remembered
but which checkpoints this process has verified, so a supervisor that dies anywhere is replaced by one that goes on.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from dflash.checkpoint import saved_states, set_aside
from dflash.records import EventRecord, RollbackEntry, RollbackPlan, RunPaths, to_dict
from dflash.rollback import (
    Acknowledge,
    Action,
    Facts,
    MoveAside,
    NoteCheckpoint,
    NoteRollback,
    StopTrainer,
    VerifyTarget,
    next_action,
    skips_in_force,
)
from dflash.train.book import CheckpointBook
from dflash.train.progress import newest_lines
from dflash.train.requests import acknowledge, pending_requests
from dflash.train.run_log import append_event

logger = logging.getLogger(__name__)

RETURN = ("rollback_begin", "rollback_end")
"""Events of a return, in their order."""


class Rollbacks:
    """Carries the rollbacks of one run out.

    Args:
        paths: the run's folder.
        book: its ledger and checkpoints.
        newest_segment: highest segment that the log or a checkpoint names.
    """

    def __init__(self, paths: RunPaths, book: CheckpointBook, *, newest_segment: Callable[[], int]) -> None:
        self._paths = paths
        self._book = book
        self._newest_segment = newest_segment
        self._verified: dict[int, str | None] = {}
        self._quiet: tuple[object, ...] | None = None

    def settle(self, *, stop_trainer: Callable[[], None] | None, learn: Callable[[], None]) -> bool:
        """Do everything that there is to do now.

        Args:
            stop_trainer: ends the trainer with everything it started; None while none runs.
            learn: notes which checkpoints have become clean by now; called before a rollback begins.

        Returns:
            Whether the trainer was stopped.
        """
        if self._glance(alive=stop_trainer is not None) == self._quiet:
            return False
        if stop_trainer is None:
            self._complete_log()
        stopped = learned = False
        while (action := next_action(self._facts(trainer_alive=stop_trainer is not None and not stopped))) is not None:
            if not learned and isinstance(action, NoteRollback) and action.entry.phase == "begin":
                learn()  # whoever decided knew the ledger as it was then: more may be clean by now
                learned = True
            elif isinstance(action, StopTrainer) and stop_trainer is not None:
                stop_trainer()
                self._book.reconcile()  # it may have saved once more
                stopped = True
            else:
                self._perform(action)
        self._quiet = self._glance(alive=stop_trainer is not None and not stopped)
        return stopped

    def _glance(self, *, alive: bool) -> tuple[object, ...]:
        """What any action comes from, cheaply: while it stays the same, there is nothing to do that was not done."""
        folder = self._paths.requests_dir
        names = tuple(sorted(entry.name for entry in os.scandir(folder))) if folder.is_dir() else ()
        return (names, len(self._book.lines), self._newest_segment(), alive)

    def halt(self) -> RollbackPlan | None:
        """The decision that ended this run for good, if one did."""
        halts = [line for line in self._book.lines if isinstance(line, RollbackEntry) and line.phase == "halt"]
        return halts[-1].plan if halts else None

    def done(self) -> int:
        """Rollbacks that were carried out."""
        return sum(isinstance(line, RollbackEntry) and line.phase == "end" for line in self._book.lines)

    def pending(self) -> bool:
        """Whether there is anything to settle."""
        return next_action(self._facts(trainer_alive=True)) is not None

    def targets(self) -> frozenset[int]:
        """Checkpoints that requests wait to go back to: the scheduled check has chosen them, and retention must not be faster."""
        plans = (request.plan for request in pending_requests(self._paths))
        return frozenset(plan.target_step for plan in plans if plan is not None and plan.target_step is not None)

    def _facts(self, *, trainer_alive: bool) -> Facts:
        requests = [request.plan for request in pending_requests(self._paths) if request.plan is not None]
        return Facts(
            requests=requests,
            ledger=self._book.lines,
            segment=self._newest_segment(),
            trainer_alive=trainer_alive,
            saved=saved_states(self._paths.checkpoints_dir),
            verified=self._verified,
            now_s=time.time(),
        )

    def _perform(self, action: Action) -> None:
        match action:
            case NoteRollback(entry):
                self._note(entry)
            case NoteCheckpoint(step, segment, state, reason):
                self._book.note(step, segment, state, reason)
            case VerifyTarget(step):
                self._verified[step] = self._book.problem_of(step)
            case MoveAside(step, segment):
                logger.warning("checkpoint step-%d of segment %d is set aside", step, segment)
                set_aside(self._paths.checkpoints_dir, step, segment=segment)
            case Acknowledge(key, outcome):
                acknowledge(self._paths, key, outcome=outcome)
            case StopTrainer():
                raise RuntimeError("there is no trainer to stop")

    def _note(self, entry: RollbackEntry) -> None:
        self._book.note_rollback(entry)
        plan = entry.plan
        if entry.phase == "begin":
            logger.warning("rolling back to step %s (rung %d): %s", entry.target_step, plan.rung, plan.reason)
        elif entry.phase == "halt":
            logger.error("the run is halted: %s", plan.reason)
        else:
            self._log_return(entry)
            logger.warning("back at step %s; segment %s goes on without %s", entry.target_step, entry.next_segment, plan.skip)

    def _complete_log(self) -> None:
        """Tell of the newest return what a supervisor that died behind its note in the ledger could not tell any more."""
        last = next((line for line in reversed(self._book.lines) if isinstance(line, RollbackEntry)), None)
        if last is not None and last.next_segment is not None and last.next_segment > self._newest_segment():
            self._log_return(last)

    def _log_return(self, entry: RollbackEntry) -> None:
        """Tell the log's readers, once; the trainer is stopped, so nobody else writes."""
        details = {"key": entry.plan.key, "rung": entry.plan.rung, "target_step": entry.target_step}
        skipped = [list(part) for part in skips_in_force(self._book.lines)]
        overlay = None if entry.plan.overlay is None else to_dict(entry.plan.overlay)
        told = {(item["event"], item["details"].get("key")) for item in newest_lines(self._paths) if item.get("event") in RETURN}
        for name, more in zip(RETURN, ({}, {"skipped": skipped, "overlay": overlay}), strict=True):
            if (name, entry.plan.key) not in told:
                append_event(self._paths.log, self._event(entry, name, {**details, **more}))

    def _event(self, entry: RollbackEntry, name: str, details: dict[str, object]) -> EventRecord:
        ended = name == "rollback_end"
        return EventRecord(
            segment=int(entry.next_segment or 0) if ended else entry.plan.segment,
            step=int(entry.target_step or 0) if ended else entry.plan.alarm_step,
            wall_time_s=time.time(),
            mono_time_s=time.monotonic(),
            event="rollback_end" if ended else "rollback_begin",
            details=details,
        )
