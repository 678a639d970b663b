"""Whether what happened in a drill was the right thing for its fault: a pure function of facts and the fault-free run.

Step arithmetic as in the log: the fault's first record is the onset t; `step-N` with N <= t is untouched by it, and one that had
passed its soak before t is clean. The newest truly clean checkpoint is therefore the last one saved with N + soak <= t; a later
one up to t is untouched as well and even better, a yet earlier one means that the health check dated the fault too early.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dflash.config import CheckpointConfig
from dflash.drill.facts import COMPLETED, DrillFacts
from dflash.drill.faults import Fault
from dflash.drill.reference import Reference
from dflash.drill.timeline import WIDTH
from dflash.records import RollbackEntry

LOSS_TOLERANCE = 1.10
"""A recovered run's loss at the end, against that of the fault-free run."""

LAST_STEPS = 200
ACCEPTANCE_FRAC = 0.85
"""Least final acceptance against the fault-free run, whose interval it must meet besides."""


@dataclass(frozen=True, slots=True)
class Check:
    """One demand of the verdict."""

    name: str
    holds: bool
    found: str


def judge(
    fault: Fault, facts: DrillFacts, reference: Reference, *, rule: CheckpointConfig, check_every_s: float
) -> tuple[Check, ...]:
    """Everything that must hold after a drill.

    Args:
        fault: what was planted.
        facts: what happened.
        reference: the run without the fault.
        rule: of its checkpoints.
        check_every_s: time between two health checks.
    """
    acted = _acted(facts, rule, check_every_s) if fault.acts else _left_alone(facts)
    checks = [*_planted(fault, facts), *acted]
    checks += [*_seen(fault, facts), *_survived(facts), _ended(facts), *_result(fault, facts, reference)]
    return tuple(checks)


def is_right(checks: Sequence[Check]) -> bool:
    """Whether all of it holds."""
    return all(check.holds for check in checks)


def onset_of(facts: DrillFacts) -> int | None:
    """First step that the fault touched, None if it never took effect."""
    return facts.planted[0].step if facts.planted else facts.struck_step


def newest_truly_clean(onset: int, *, durable: Collection[int], soak_steps: int) -> int:
    """Last of the saved checkpoints that had passed its soak before a fault's first record; 0 if none had."""
    return max((step for step in durable if step + soak_steps <= onset), default=0)


def _planted(fault: Fault, facts: DrillFacts) -> Iterator[Check]:
    onset = onset_of(facts)
    if fault.name == "none":
        yield Check("no fault", onset is None, "nothing was planted" if onset is None else f"planted at step {onset}")
    else:
        yield Check("fault took effect", onset is not None, "never" if onset is None else f"at step {onset}")


def _acted(facts: DrillFacts, rule: CheckpointConfig, check_every_s: float) -> Iterator[Check]:
    onset = onset_of(facts)
    ends = [entry for entry in facts.rollbacks if entry.phase == "end"]
    if onset is None or not facts.requests or not ends:
        yield Check("detected", bool(facts.requests), f"{len(facts.requests)} requests")
        yield Check("rolled back", bool(ends), f"{len(ends)} rollbacks")
        return
    first, end = facts.requests[0], ends[0]
    waited_s = first.at_s - facts.planted[0].at_s
    alarm = end.plan.alarm_step
    yield Check("detected", alarm >= onset, f"after {alarm - onset} steps, requested after {waited_s:.1f} s")
    newest = newest_truly_clean(onset, durable=facts.log.durable, soak_steps=rule.soak_steps)
    yield _returned(end, onset, newest)
    yield _lost(facts, end, onset, rule, check_every_s)
    halts = sum(entry.phase == "halt" for entry in facts.rollbacks)
    yield Check("one rollback, no halt", len(ends) == 1 and not halts, f"{len(ends)} rollbacks, {halts} halts")
    yield _skipped(facts, ends)
    back_at_s = None if end.next_segment is None else facts.log.first_step_at_s.get(end.next_segment)
    found = "never" if back_at_s is None else f"{back_at_s - first.at_s:.1f} s after the request"
    yield Check("trains again", back_at_s is not None, found)


def _returned(end: RollbackEntry, onset: int, newest: int) -> Check:
    target = end.target_step
    holds = target is not None and newest <= target <= onset
    return Check("back at the newest truly clean", holds, f"step-{target} (soaked before the fault: step-{newest})")


def _lost(facts: DrillFacts, end: RollbackEntry, onset: int, rule: CheckpointConfig, check_every_s: float) -> Check:
    cost = steps_lost(facts, end, onset=onset, rule=rule, check_every_s=check_every_s)
    if cost is None:
        return Check("steps lost", False, "the abandoned segment has no records")
    lost, bound = cost
    return Check("steps lost", lost <= bound, f"{lost}; by save interval, soak, detection and time to stop at most {bound}")


def steps_lost(
    facts: DrillFacts, end: RollbackEntry, *, onset: int, rule: CheckpointConfig, check_every_s: float
) -> tuple[int, int] | None:
    """Steps that a rollback cost, and what it may cost; None without records.

    The bound: save interval + soak + steps from onset to alarm + what is trained while a check is waited for and the trainer stops.
    """
    segment = end.plan.segment
    if segment not in facts.log.last_record or end.target_step is None:
        return None
    last_step, last_at_s = facts.log.last_record[segment]
    first_step = facts.log.resumed_from.get(segment, 0)
    step_s = (last_at_s - facts.log.first_step_at_s[segment]) / max(1, last_step - first_step)
    stopping_s = max(0.0, last_at_s - facts.requests[0].at_s)
    steps = rule.interval_steps + rule.soak_steps + end.plan.alarm_step - onset
    return last_step + 1 - end.target_step, steps + math.ceil((check_every_s + stopping_s) / max(step_s, 1e-9))


def _skipped(facts: DrillFacts, ends: list[RollbackEntry]) -> Check:
    plan = facts.plan
    bad = range(plan.first_position, plan.end_position)
    skipped = {position for entry in ends for first, end in entry.plan.skip for position in range(first, end)}
    shown = f"{len(skipped)} batches" + (f", {min(skipped)}..{max(skipped)}" if skipped else "")
    if not bad:
        return Check("batches left out", True, shown)
    return Check("bad batches left out", set(bad) <= skipped, f"{shown}; bad: {bad.start}..{bad.stop - 1}")


def _left_alone(facts: DrillFacts) -> Iterator[Check]:
    found = f"{len(facts.requests)} requests, {len(facts.rollbacks)} ledger lines about rollbacks"
    yield Check("no rollback, no halt", not facts.requests and not facts.rollbacks, found)


def _seen(fault: Fault, facts: DrillFacts) -> Iterator[Check]:
    if fault.seen_as:
        found = sorted(facts.found_by & set(fault.seen_as))
        yield Check("reported", bool(found), ", ".join(found) or f"none of {', '.join(fault.seen_as)}")


def _survived(facts: DrillFacts) -> Iterator[Check]:
    """What must hold where a process was killed or a checkpoint damaged."""
    hit, resumed = facts.hit_checkpoint, facts.log.resumed_from
    if hit is None:
        return
    yield Check("damaged checkpoint refused", hit in facts.bad_checkpoints, f"step-{hit}, bad: {sorted(facts.bad_checkpoints)}")
    from_steps = [step for _, step in sorted(resumed.items())]
    yield Check("resumed from one before", bool(from_steps) and from_steps[0] < hit, f"from step-{from_steps}")


def _ended(facts: DrillFacts) -> Check:
    holds = facts.ended == COMPLETED and not facts.processes_left
    return Check("flow run completed", holds, f"{facts.ended}, {facts.processes_left} processes left")


def _result(fault: Fault, facts: DrillFacts, reference: Reference) -> Iterator[Check]:
    if fault.exact:
        same = facts.outcome.weights_sha256 == reference.weights_sha256
        yield Check("same weights as without the fault", same, str(facts.outcome.weights_sha256)[:12])
    else:
        yield _recovered(facts, reference)
    length, interval = facts.outcome.acceptance_length, facts.outcome.acceptance_ci
    low, high = reference.acceptance_ci
    if length is None or interval is None:
        yield Check("final acceptance", False, "not evaluated")
        return
    good = length >= ACCEPTANCE_FRAC * reference.acceptance_length and interval[1] >= low
    found = f"{length:.2f} [{interval[0]:.2f}, {interval[1]:.2f}], without the fault {reference.acceptance_length:.2f}"
    yield Check("final acceptance", good, f"{found} [{low:.2f}, {high:.2f}]")


def _recovered(facts: DrillFacts, reference: Reference) -> Check:
    own, other = last_loss(facts.log.loss), last_loss(dict(enumerate(reference.losses)))
    if own is None or other is None:
        return Check("recovered", False, "no losses at the end")
    return Check("recovered", own <= LOSS_TOLERANCE * other, f"loss at the end {own:.3f}, without the fault {other:.3f}")


def last_loss(losses: Mapping[int, float | None]) -> float | None:
    """Median loss of the last steps, None if any of them has none."""
    last = [losses[step] for step in sorted(losses)[-LAST_STEPS:]]
    known = [value for value in last if value is not None]
    return statistics.median(known) if known and len(known) == len(last) else None


def verdict_lines(fault: Fault, checks: Sequence[Check]) -> list[str]:
    """The verdict in at most 80 columns."""
    lines = ["", f"verdict on `{fault.name}`: {'RIGHT' if is_right(checks) else 'WRONG'}"]
    for check in checks:
        mark = "ok   " if check.holds else "WRONG"
        lines += textwrap.wrap(f"{check.name}: {check.found}", WIDTH, initial_indent=f"  {mark}  ", subsequent_indent=" " * 11)
    return lines
