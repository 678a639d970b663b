"""How right the checker was: pure functions of labels and of what was said.

Event: a labelled fault that something should be said of. It is recalled if one of its detectors spoke, at its severity
or above, about steps of the fault. A false event is a group of warnings or alarms that no label accounts for.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.health.labels import Label
from benchmarks.health.watch import Said, Watched
from dflash.records import Finding, RollbackPlan

_RANK = {"info": 0, "warn": 1, "critical": 2}
_EARLY, _LATE = 45, 250  # steps around a fault that its echoes may lie in
_GROUP_STEPS = 50


@dataclass
class Score:
    """Counts of one kind (or of all); rates are derived."""

    runs: int = 0
    events: int = 0
    recalled: int = 0
    delays: list[int] = field(default_factory=list)
    false_events: int = 0
    false_criticals: int = 0
    right_decisions: int = 0
    targets: int = 0
    right_targets: int = 0
    culprits: int = 0
    skipped_culprits: int = 0
    causes: int = 0
    right_causes: int = 0
    steps: int = 0

    def add(self, other: Score) -> None:
        """Add another score's counts."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def is_right(self) -> bool:
        """Whether nothing at all was wrong with what was said."""
        found = self.recalled == self.events and not self.false_events and self.right_causes == self.causes
        acted = self.right_decisions == self.runs and self.right_targets == self.targets and self.skipped_culprits == self.culprits
        return found and acted

    def per_100k_clean(self, clean: Score) -> float | None:
        """False alarms of the clean runs, per 100 000 steps."""
        return round(1e5 * clean.false_criticals / clean.steps, 3) if clean.steps else None

    def figures(self) -> dict[str, float | int | None]:
        """The rates, None where there is nothing to take one of."""
        return {
            "runs": self.runs,
            "event_recall": _rate(self.recalled, self.events),
            "precision": _rate(self.recalled, self.recalled + self.false_events),
            "delay_p50_steps": _percentile(self.delays, 50),
            "delay_p90_steps": _percentile(self.delays, 90),
            "false_criticals": self.false_criticals,
            "wrong_class_rate": None if not self.causes else round(1 - self.right_causes / self.causes, 4),
            "decision_accuracy": _rate(self.right_decisions, self.runs),
            "target_right": _rate(self.right_targets, self.targets),
            "culprit_recall": _rate(self.skipped_culprits, self.culprits),
        }


def score_run(label: Label | None, watched: Watched, *, saves: Sequence[int], soak_steps: int, interleaved: bool) -> Score:
    """The score of one run with at most one fault; in a shuffled one, stretches of one bucket are really there."""
    steps = watched.report.records
    score = Score(runs=1, steps=steps)
    rolls_back = label is not None and label.rolls_back
    score.right_decisions = int((watched.decision is not None) == rolls_back and not _premature(label, watched.decision))
    loud = [each for each in watched.said if _RANK[each.finding.severity] >= 1]
    if not interleaved:
        loud = [each for each in loud if each.finding.detector != "bucket run"]
    loose = [said.finding for said in loud if label is None or not _accounts_for(label, said.finding)]
    score.false_events = _groups(loose)
    critical = [finding for finding in loose if finding.severity == "critical"]
    score.false_criticals = _groups(critical)
    if label is None:
        return score
    if label.detectors:
        _recall(score, label, watched.said)
    if rolls_back and watched.decision is not None:
        _decision(score, label, watched.decision, saves=saves, soak_steps=soak_steps)
    named = _cause_named(label, watched.said)
    if label.causes and named is not None:
        score.causes, score.right_causes = 1, int(named in label.causes)
    return score


def _recall(score: Score, label: Label, said: Iterable[Said]) -> None:
    score.events = 1
    hits = [
        _when(each)
        for each in said
        if each.finding.detector in label.detectors
        and _RANK[each.finding.severity] >= _RANK[label.severity]
        and _overlaps(label, each.finding)
    ]
    if hits:
        score.recalled = 1
        score.delays = [max(0, min(hits) - label.due)]


def _decision(score: Score, label: Label, decision: RollbackPlan, *, saves: Sequence[int], soak_steps: int) -> None:
    score.targets = 1
    truth = max((save for save in saves if save + soak_steps <= label.onset), default=0)
    score.right_targets = int(decision.target_step == truth)
    skipped = {position for first, end in decision.skip for position in range(first, end)}
    score.culprits = len(label.culprits)
    score.skipped_culprits = sum(batch in skipped for batch in label.culprits)


def _premature(label: Label | None, decision: RollbackPlan | None) -> bool:
    return label is not None and decision is not None and decision.alarm_step < label.onset


def _when(said: Said) -> int:
    """Step at which it was certain: the alarm's own, or the end of the reading that first told of it."""
    alarm = said.finding.values.get("alarm_step")
    return int(alarm) if alarm is not None else said.seen_step


def _overlaps(label: Label, finding: Finding) -> bool:
    return finding.first_step <= label.end + _LATE and finding.last_step >= label.onset - _EARLY


def _accounts_for(label: Label, finding: Finding) -> bool:
    if finding.detector not in label.detectors | label.tolerated or not _overlaps(label, finding):
        return False
    return finding.severity != "critical" or label.rolls_back or label.severity == "critical"


def _cause_named(label: Label, said: Iterable[Said]) -> str | None:
    """The cause given to the heaviest finding of the fault."""
    near = [each.finding for each in said if _overlaps(label, each.finding) and "cause" in each.finding.values]
    near = [finding for finding in near if finding.first_step >= label.onset - _EARLY]
    if not near:
        return None
    heaviest = max(near, key=lambda f: (f.detector in label.detectors, _RANK[f.severity], f.last_step - f.first_step))
    return str(heaviest.values["cause"])


def _groups(findings: Iterable[Finding]) -> int:
    """Findings of one detector closer than `_GROUP_STEPS` are one event to whoever reads them."""
    count = 0
    last: dict[str, int] = {}
    for finding in sorted(findings, key=lambda f: (f.detector, f.first_step)):
        if finding.detector not in last or finding.first_step - last[finding.detector] > _GROUP_STEPS:
            count += 1
        last[finding.detector] = max(finding.last_step, last.get(finding.detector, 0))
    return count


def _rate(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _percentile(values: list[int], percent: int) -> float | None:
    if not values:
        return None
    return values[0] if len(values) == 1 else round(statistics.quantiles(values, n=100, method="inclusive")[percent - 1], 1)
