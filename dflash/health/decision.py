"""What should happen to the run, as a pure function of findings. Detecting is not acting: nothing is executed here.

Action follows damage alone: only critical findings of training lead to a decision, whatever their cause. It rests on
the first alarm, so that it (and its key) stays the same while later findings pile up.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from dflash.records import Decision, Finding, HealthReport

_KEY_CHARACTERS = 16


def is_damage(finding: Finding) -> bool:
    """Whether a finding means that the weights are, or will be, damaged."""
    return finding.severity == "critical" and finding.domain == "training"


def decide(findings: Sequence[Finding], *, run: str, clean_steps: Sequence[int]) -> Decision | None:
    """The decision that the findings call for.

    Args:
        findings: of one report.
        run: name of the run, part of the key.
        clean_steps: steps of the checkpoints that the ledger calls clean.

    Returns:
        A halt that names the newest clean checkpoint at or before the onset and the plan positions consumed in
        [onset - 1, alarm], or None if nothing is damaged.
    """
    damage = [finding for finding in findings if is_damage(finding)]
    if not damage:
        return None
    alarm = min(_alarm_step(finding) for finding in damage)
    first = [finding for finding in damage if _alarm_step(finding) == alarm]
    onset = min(finding.onset_step for finding in first)
    segment = max(int(finding.values["segment"]) for finding in first)
    # Record s leads from state s to s+1, so the checkpoint of the onset step itself is still untouched.
    target = max((step for step in clean_steps if step <= onset), default=None)
    evidence = {
        "run": run,
        "action": "halt",
        "segment": segment,
        "onset": onset,
        "alarm": alarm,
        "detectors": sorted({finding.detector for finding in first}),
    }
    key = hashlib.sha256(json.dumps(evidence, sort_keys=True).encode()).hexdigest()[:_KEY_CHARACTERS]
    return Decision(
        key=f"halt-{key}",
        action="halt",
        reason="; ".join(sorted(finding.message for finding in first)),
        onset_step=onset,
        alarm_step=alarm,
        target_step=target,
        skip_positions=tuple(sorted({batch for finding in first for batch in finding.batch_ids})),
    )


def critical_training_spans(report: HealthReport) -> list[tuple[int, int]]:
    """(onset, last evidence) in record steps of every critical training finding, ascending.

    The evidence about checkpoints: none is clean whose window or soak meets such a span.
    """
    return sorted((finding.onset_step, finding.last_step) for finding in report.findings if is_damage(finding))


def _alarm_step(finding: Finding) -> int:
    return int(finding.values["alarm_step"])
