"""Damage: what the findings say of the weights, as a pure function. What to do about it is the rollback room's.

Action follows damage alone: only critical findings of training count, whatever their cause. Damage rests on the first
alarm, so that it stays the same while later findings pile up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dflash.records import Damage, Finding, HealthReport, RollbackPlan

Remedy = Callable[[Damage], RollbackPlan | None]
"""What should be done about damage; None while that has to wait."""


def is_damage(finding: Finding) -> bool:
    """Whether a finding means that the weights are, or will be, damaged."""
    return finding.severity == "critical" and finding.domain == "training"


def damage_of(findings: Sequence[Finding], *, segment: int, last_step: int) -> Damage | None:
    """The damage that the findings show.

    Args:
        findings: of one report.
        segment: newest segment of the log.
        last_step: newest live record.

    Returns:
        Onset, alarm, and the plan positions consumed between them, of the findings that alarmed first; None if nothing
        is damaged.
    """
    damage = [finding for finding in findings if is_damage(finding)]
    if not damage:
        return None
    alarm = min(_alarm_step(finding) for finding in damage)
    first = [finding for finding in damage if _alarm_step(finding) == alarm]
    consumed = {batch for finding in first for batch in finding.batch_ids}
    return Damage(
        segment=segment,
        onset_step=min(finding.onset_step for finding in first),
        alarm_step=alarm,
        first_position=min(consumed, default=0),
        end_position=max(consumed, default=-1) + 1,
        last_step=last_step,
        reason="; ".join(sorted(finding.message for finding in first)),
    )


def decided(plan: RollbackPlan, *, last_step: int | None) -> str:
    """The decision in words; with what it costs, if the newest record's step is known."""
    back = "there is no clean checkpoint to go back to" if plan.target_step is None else f"clean state: step-{plan.target_step}"
    if plan.action == "halt":
        return f"halt the run; {back}. {plan.reason}."
    skipped = sum(end - first for first, end in plan.skip)
    text = f"roll back to checkpoint step-{plan.target_step}, skip {skipped} batches of the plan (rung {plan.rung} of the ladder)"
    if plan.overlay is not None:
        text += (
            f"; the learning rate is warmed up again over {plan.overlay.rewarm_steps} steps to {plan.overlay.cap:g} of the schedule"
        )
    if last_step is not None and plan.target_step is not None:
        text += f"; what was trained since is lost, {last_step + 1 - plan.target_step} steps up to now"
    return f"{text}."


def critical_findings(report: HealthReport) -> list[Finding]:
    """The findings that mean damage, in the order of the report."""
    return [finding for finding in report.findings if is_damage(finding)]


def critical_training_spans(report: HealthReport) -> list[tuple[int, int]]:
    """(onset, last evidence) in record steps of every critical training finding, ascending.

    The evidence about checkpoints: none is clean whose window or soak meets such a span.
    """
    return sorted((finding.onset_step, finding.last_step) for finding in report.findings if is_damage(finding))


def _alarm_step(finding: Finding) -> int:
    return int(finding.values["alarm_step"])
