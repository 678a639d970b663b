"""What should happen to a damaged run: the ladder of ever stronger remedies, inside fixed budgets.

Rungs of one region: 1 the newest clean checkpoint, skipping what was consumed between onset and alarm; 2 a clean
checkpoint before that one, a wider skip, and the learning rate warmed up again; 3 the same with a wider skip still and
the rate capped; then halt. The hard decision: a decision's key is made of the run and the segment alone. A segment can
be abandoned only once, so however the evidence grows while a request waits, there is one request and one effect.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dflash.config.rollback import RollbackConfig
from dflash.records.checkpoint import LedgerEntry, LrOverlay
from dflash.records.rollback import Damage, LedgerLine, RollbackEntry, RollbackPlan, SavedState, SkipRange
from dflash.rollback.regions import DAY_S, Region, open_regions, region_of, rollbacks_begun
from dflash.rollback.skips import culprits, merged, size_of, skips_in_force

_KEY_CHARACTERS = 16


@dataclass(frozen=True, slots=True)
class Situation:
    """What a decision is made from, besides the damage.

    Attributes:
        run: name of the run.
        ledger: every line, in the order of writing.
        saved: complete checkpoints in place, by step.
        batches_per_epoch: of the plan; the share that may be skipped is measured against it.
        alive: a supervisor runs, so waiting can bring new records.
        now_s: wall time.
    """

    run: str
    ledger: Sequence[LedgerLine]
    saved: Mapping[int, SavedState]
    batches_per_epoch: int
    alive: bool
    now_s: float


def decide(damage: Damage, situation: Situation, *, rule: RollbackConfig) -> RollbackPlan | None:
    """The remedy that the damage calls for.

    Args:
        damage: of the live segment.
        situation: ledger, checkpoints, time.
        rule: ladder and budgets.

    Returns:
        A rollback or a halt; None if the damage has to wait for the cool-down after another region's rollback, or if
        this segment is abandoned already.
    """
    if any(isinstance(line, RollbackEntry) and line.plan.segment >= damage.segment for line in situation.ledger):
        return None
    regions = open_regions(situation.ledger, region_steps=rule.region_steps)
    region = region_of(damage.onset_step, regions, region_steps=rule.region_steps)
    if region is None and situation.alive and _is_cooling_down(damage, situation.ledger, rule):
        return None
    rung = 1 if region is None else region.rollbacks + 1
    refusal = _spent(situation, region, rule)
    target = _target(damage, situation, region)
    if refusal is None and target is None:
        refusal = f"there is no clean checkpoint at or before step {damage.onset_step}"
    skip: tuple[SkipRange, ...] = ()
    if refusal is None and target is not None:
        wanted = (0, *rule.skip_positions)[min(rung, 3) - 1]
        skip = culprits(
            damage.first_position, damage.end_position, at_least=wanted, not_before=situation.saved[target].plan_position
        )
        refusal = _too_much_skipped(skip, situation, rule)
    plan = RollbackPlan(
        key=decision_key(situation.run, damage.segment),
        action="rollback",
        rung=rung,
        segment=damage.segment,
        onset_step=damage.onset_step,
        alarm_step=damage.alarm_step,
        region_step=damage.onset_step if region is None else region.first_onset,
        target_step=target,
        skip=skip,
        overlay=None if target is None else _overlay(rung, target, rule),
        reason=damage.reason,
    )
    return plan if refusal is None else _as_halt(plan, refusal)


def decision_key(run: str, segment: int) -> str:
    """The idempotency key of whatever abandons a segment."""
    digest = hashlib.sha256(f"{run}\n{segment}".encode()).hexdigest()
    return f"segment-{segment}-{digest[:_KEY_CHARACTERS]}"


def clean_steps(ledger: Sequence[LedgerLine], saved: Mapping[int, SavedState]) -> list[int]:
    """Checkpoints in place whose newest line says clean, ascending.

    A line of an earlier segment speaks of a checkpoint of the same step that was abandoned since, not of this one.
    """
    newest = {line.step: line for line in ledger if isinstance(line, LedgerEntry)}
    return [
        step
        for step, state in sorted(saved.items())
        if step in newest and newest[step].state == "clean" and newest[step].segment == state.segment
    ]


def _is_cooling_down(damage: Damage, ledger: Sequence[LedgerLine], rule: RollbackConfig) -> bool:
    ends = [line for line in ledger if isinstance(line, RollbackEntry) and line.phase == "end"]
    if not ends or ends[-1].target_step is None:
        return False
    return damage.last_step < ends[-1].target_step + rule.cooldown_steps


def _spent(situation: Situation, region: Region | None, rule: RollbackConfig) -> str | None:
    """Why no further rollback is allowed, None if one is."""
    if not rule.enabled:
        return "rollbacks are switched off (rollback.enabled)"
    if region is not None and region.rollbacks >= rule.max_per_region:
        return f"{region.rollbacks} rollbacks around step {region.first_onset} did not help"
    if rollbacks_begun(situation.ledger, since_s=situation.now_s - DAY_S) >= rule.max_per_day:
        return f"the budget of {rule.max_per_day} rollbacks a day is spent"
    if rollbacks_begun(situation.ledger, since_s=float("-inf")) >= rule.max_per_run:
        return f"the budget of {rule.max_per_run} rollbacks a run is spent"
    if rule.max_per_region == 0:
        return "no rollback is allowed (rollback.max_per_region is 0)"
    return None


def _target(damage: Damage, situation: Situation, region: Region | None) -> int | None:
    """Newest clean checkpoint untouched by the damage; on higher rungs one before the last that was tried."""
    clean = [step for step in clean_steps(situation.ledger, situation.saved) if step <= damage.onset_step]
    if region is not None and region.rollbacks == 1:
        # Where nothing lies before it, the last target is the only one there is.
        clean = [step for step in clean if step < region.last_target] or clean[:1]
    elif region is not None:
        clean = [step for step in clean if step <= region.last_target] or clean[:1]
    return clean[-1] if clean else None


def _overlay(rung: int, target: int, rule: RollbackConfig) -> LrOverlay | None:
    if rung == 1:
        return None
    cap = 1.0 if rung == 2 else rule.lr_cap
    return LrOverlay(from_step=target, rewarm_from=min(rule.rewarm_from, cap), rewarm_steps=rule.rewarm_steps, cap=cap)


def _too_much_skipped(skip: tuple[SkipRange, ...], situation: Situation, rule: RollbackConfig) -> str | None:
    skipped = merged((*skips_in_force(situation.ledger), *skip))
    size = situation.batches_per_epoch
    allowed = rule.max_skip_frac * size
    for epoch in sorted({epoch for first, end in skipped for epoch in range(first // size, (end - 1) // size + 1)}):
        within = merged((max(first, epoch * size), min(end, (epoch + 1) * size)) for first, end in skipped)
        if size_of(within) > allowed:
            return f"{size_of(within)} batches of epoch {epoch} would be skipped, {int(allowed)} are allowed"
    return None


def _as_halt(plan: RollbackPlan, why: str) -> RollbackPlan:
    return RollbackPlan(
        key=plan.key,
        action="halt",
        rung=plan.rung,
        segment=plan.segment,
        onset_step=plan.onset_step,
        alarm_step=plan.alarm_step,
        region_step=plan.region_step,
        target_step=plan.target_step,
        skip=(),
        overlay=None,
        reason=f"{plan.reason}; halted because {why}",
    )
