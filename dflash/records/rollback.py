"""Records of a rollback: what is decided, and what the ledger keeps of it.

The ledger is the only memory of rollbacks: counters, skips and the learning-rate overlay are derived from its entries,
never from a checkpoint, because a restored counter is an endless loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dflash.records.checkpoint import LedgerEntry, LrOverlay

ROLLBACK_SCHEMA_VERSION = 1

RollbackAction = Literal["rollback", "halt"]
RollbackPhase = Literal["begin", "end", "halt"]
SkipRange = tuple[int, int]
"""Half-open range [first, end) of plan positions."""


@dataclass(frozen=True, slots=True)
class Damage:
    """What the health check knows of a damaged run; all steps are record steps of live records.

    Attributes:
        segment: newest segment of the log; the damage may have begun in an earlier one whose records still live.
        onset_step: where the deviation began; alarm_step: where it became certain.
        first_position, end_position: plan positions consumed by the records [onset - 1, alarm], half-open.
        last_step: newest live record.
        reason: one sentence for people.
    """

    segment: int
    onset_step: int
    alarm_step: int
    first_position: int
    end_position: int
    last_step: int
    reason: str


@dataclass(frozen=True, slots=True)
class SavedState:
    """A complete checkpoint in place: the segment that wrote it, and the plan position that it continues from."""

    segment: int
    plan_position: int


@dataclass(frozen=True, slots=True)
class RollbackPlan:
    """One rollback (or the halt that stands in its place), decided but not executed.

    Attributes:
        key: the same for the same run and segment: a segment is abandoned at most once.
        rung: of the ladder, from 1; a halt has the rung that it replaces.
        segment: the segment to be abandoned.
        region_step: first onset of the region that the onset belongs to.
        target_step: clean checkpoint to return to; None for a halt.
        skip: plan positions that are never consumed again, of this decision alone.
        overlay: change of the learning rate, None for none.
    """

    key: str
    action: RollbackAction
    rung: int
    segment: int
    onset_step: int
    alarm_step: int
    region_step: int
    target_step: int | None
    skip: tuple[SkipRange, ...]
    overlay: LrOverlay | None
    reason: str
    schema_version: int = ROLLBACK_SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class RollbackEntry:
    """One line of the ledger about a rollback, written by the run's supervisor only.

    Attributes:
        phase: `begin` is the intention (nothing has happened yet), `end` says that the state is back at `target_step`
            and names the segment that goes on from there; `halt` ends the run.
        target_step: the checkpoint really returned to (an older one where the planned one did not verify).
        next_segment: of `end`; None otherwise.
        at_s: wall time, for the budget of a day.
    """

    phase: RollbackPhase
    plan: RollbackPlan
    target_step: int | None
    next_segment: int | None
    at_s: float
    schema_version: int = ROLLBACK_SCHEMA_VERSION


LedgerLine = LedgerEntry | RollbackEntry
"""Anything that stands in the ledger, in the order it was written."""
