"""Carrying a decision out: the next thing a supervisor has to do, derived from durable facts alone.

Invariant: every action is either one durable effect or harmless to repeat, and none depends on anything that the one
before it left in memory. A supervisor that dies anywhere is replaced by one that asks the same question again.

Order: note the intention (with the newest checkpoint that has become clean since the decision), stop the trainer, verify
the checkpoint (an older clean one where it does not verify), move the abandoned checkpoints aside, note the end with the
number of the next segment, acknowledge. Starting the trainer is not part of it: after the end the newest checkpoint in
place is the one returned to, and the ledger tells its skips.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dflash.records.checkpoint import CheckpointState, LedgerEntry
from dflash.records.rollback import LedgerLine, RollbackEntry, RollbackPhase, RollbackPlan, SavedState
from dflash.rollback.ladder import clean_steps
from dflash.rollback.skips import part_behind


@dataclass(frozen=True, slots=True)
class Facts:
    """What a supervisor can see after a restart.

    Attributes:
        requests: plans requested and not acknowledged, oldest first.
        ledger: every line, in the order of writing.
        segment: highest segment that any record, checkpoint or ledger line names.
        trainer_alive: a trainer process of this run exists.
        saved: complete checkpoints in place, by step.
        verified: step to what is wrong with it (None: nothing), for the checkpoints verified by this supervisor.
        now_s: wall time.
    """

    requests: Sequence[RollbackPlan]
    ledger: Sequence[LedgerLine]
    segment: int
    trainer_alive: bool
    saved: Mapping[int, SavedState]
    verified: Mapping[int, str | None]
    now_s: float


@dataclass(frozen=True, slots=True)
class NoteRollback:
    """Append a line about the rollback to the ledger."""

    entry: RollbackEntry


@dataclass(frozen=True, slots=True)
class NoteCheckpoint:
    """Append a checkpoint's transition to the ledger (time of writing left to the supervisor)."""

    step: int
    segment: int
    state: CheckpointState
    reason: str


@dataclass(frozen=True, slots=True)
class StopTrainer:
    """End the trainer and everything it started."""


@dataclass(frozen=True, slots=True)
class VerifyTarget:
    """Check sizes, hashes and finiteness of a checkpoint."""

    step: int


@dataclass(frozen=True, slots=True)
class MoveAside:
    """Move an abandoned checkpoint out of the way; it is kept, but nothing continues from it."""

    step: int
    segment: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Answer a request."""

    key: str
    outcome: str


Action = NoteRollback | NoteCheckpoint | StopTrainer | VerifyTarget | MoveAside | Acknowledge


def next_action(facts: Facts) -> Action | None:
    """The next thing to do for the rollback in progress or the oldest request; None if there is nothing to do."""
    begun = _unfinished(facts.ledger)
    if begun is not None:
        return _continue(begun.plan, facts)
    for plan in facts.requests:
        done = _finished(plan.key, facts.ledger)
        if done is not None:
            outcome = (
                "the run is halted"
                if done.phase == "halt"
                else f"back at step {done.target_step}, segment {done.next_segment} goes on"
            )
            return Acknowledge(plan.key, outcome)
        if plan.segment != facts.segment:
            return Acknowledge(plan.key, f"superseded: segment {plan.segment} is over, segment {facts.segment} runs")
        if plan.action == "halt":
            return StopTrainer() if facts.trainer_alive else _note("halt", plan, facts, target=None, segment=None)
        now = _up_to_date(plan, facts)
        return _note("begin", now, facts, target=now.target_step, segment=None)
    return None


def _up_to_date(plan: RollbackPlan, facts: Facts) -> RollbackPlan:
    """The plan with the newest checkpoint that is clean by now.

    A scheduled check decides from the ledger as it was: a checkpoint whose soak had just ended may have become clean since. Later
    rungs mean to go further back, and keep their target.
    """
    if plan.rung != 1 or plan.target_step is None:
        return plan
    newest = max((step for step in clean_steps(facts.ledger, facts.saved) if step <= plan.onset_step), default=0)
    if newest <= plan.target_step:
        return plan
    skip = part_behind(plan.skip, facts.saved[newest].plan_position)
    return dataclasses.replace(plan, target_step=newest, skip=skip)


def _continue(plan: RollbackPlan, facts: Facts) -> Action:
    if facts.trainer_alive:
        return StopTrainer()
    target = usable_target(plan, facts.ledger, facts.saved)
    if target is None:
        return _note("halt", plan, facts, target=None, segment=None)
    if target not in facts.verified:
        return VerifyTarget(target)
    problem = facts.verified[target]
    if problem is not None:
        return NoteCheckpoint(target, facts.saved[target].segment, "bad", problem)
    for step in sorted(facts.saved, reverse=True):
        if step > target and facts.saved[step].segment <= plan.segment:
            return MoveAside(step, facts.saved[step].segment)
    for step, line in sorted(_checkpoint_lines(facts.ledger).items(), reverse=True):
        if step > target and line.segment <= plan.segment and line.state != "bad":
            return NoteCheckpoint(step, line.segment, "bad", f"abandoned by the rollback to step {target}")
    return _note("end", plan, facts, target=target, segment=facts.segment + 1)


def usable_target(plan: RollbackPlan, ledger: Sequence[LedgerLine], saved: Mapping[int, SavedState]) -> int | None:
    """The planned checkpoint while it is clean and there, else the newest clean one before it."""
    if plan.target_step is None:
        return None
    return max((step for step in clean_steps(ledger, saved) if step <= plan.target_step), default=None)


def _unfinished(ledger: Sequence[LedgerLine]) -> RollbackEntry | None:
    last = next((line for line in reversed(ledger) if isinstance(line, RollbackEntry)), None)
    return last if last is not None and last.phase == "begin" else None


def _finished(key: str, ledger: Sequence[LedgerLine]) -> RollbackEntry | None:
    lines = (line for line in ledger if isinstance(line, RollbackEntry) and line.plan.key == key and line.phase != "begin")
    return next(lines, None)


def _checkpoint_lines(ledger: Sequence[LedgerLine]) -> dict[int, LedgerEntry]:
    return {line.step: line for line in ledger if isinstance(line, LedgerEntry)}


def _note(phase: RollbackPhase, plan: RollbackPlan, facts: Facts, *, target: int | None, segment: int | None) -> NoteRollback:
    return NoteRollback(RollbackEntry(phase, plan, target_step=target, next_segment=segment, at_s=facts.now_s))
