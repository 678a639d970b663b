"""One word on the run, and one sentence on why: unhealthy before blind before watch before healthy.

The hard decision: `watch` is about now. A warning that has settled, or that lies further back than the window that a
checkpoint's cleanliness looks at, stays in the report but no longer in the verdict; otherwise every long run would
end on `watch`, and the word would mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash.health.decision import is_damage
from dflash.records import Finding, Verdict

# Operational findings that make the log itself unfit to judge; the others (a hanging save, a crawl) are worth a look.
_BLINDING = frozenset({"stale log", "step integrity"})


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a verdict rests on.

    Attributes:
        steps: live step records.
        last_step: newest live step.
        coverage_frac: share of the steps up to there that the log holds, with a loss.
        loss_points: micro-batches whose loss was judged against a baseline.
        learning: buckets that are still learning their baseline.
        recent_steps: how far back a warning still counts.
        min_coverage_frac: share under which the log says too little.
        ended: the run is over.
    """

    findings: Sequence[Finding]
    steps: int
    last_step: int
    coverage_frac: float
    loss_points: int
    learning: int
    recent_steps: int
    min_coverage_frac: float
    ended: bool


def judge(evidence: Evidence) -> tuple[Verdict, str]:
    """The verdict and its headline."""
    damage = [finding for finding in evidence.findings if is_damage(finding)]
    if damage:
        first = min(damage, key=lambda finding: (int(finding.values["alarm_step"]), finding.onset_step))
        return "unhealthy", f"Training is damaged: {first.message}{_more(len(damage))}."
    blind = _blindness(evidence)
    if blind is not None:
        return "blind", blind
    pressing = [finding for finding in evidence.findings if _presses(finding, evidence)]
    if pressing:
        newest = max(pressing, key=lambda finding: (finding.severity == "critical", finding.last_step))
        return "watch", f"Worth a look: {newest.message}{_more(len(pressing))}."
    return "healthy", _all_well(evidence)


def _blindness(evidence: Evidence) -> str | None:
    if evidence.steps == 0:
        return "The log holds no step yet, so nothing can be said of the run."
    broken = [f for f in evidence.findings if f.severity == "critical" and f.detector in _BLINDING]
    if broken:
        return f"The run cannot be judged from its log: {broken[0].message}{_more(len(broken))}."
    if evidence.coverage_frac < evidence.min_coverage_frac:
        return (
            f"The log covers only {100 * evidence.coverage_frac:.1f} % of the steps; "
            f"{100 * evidence.min_coverage_frac:g} % are needed to judge the run."
        )
    if evidence.ended and evidence.loss_points == 0:
        return f"The run ended after {evidence.steps} steps, too few to learn what its loss usually is."
    return None


def _presses(finding: Finding, evidence: Evidence) -> bool:
    if finding.severity == "info" or "resolved_step" in finding.values:
        return False
    return finding.last_step > evidence.last_step - evidence.recent_steps


def _all_well(evidence: Evidence) -> str:
    warnings = sum(finding.severity == "warn" for finding in evidence.findings)
    text = f"{evidence.steps:,} steps checked, nothing to act on"
    if warnings:
        text += f"; {warnings} earlier warning{'s' if warnings > 1 else ''} settled or past"
    if evidence.loss_points == 0:
        text += "; the loss is not judged yet, its baselines are still being learnt"
    elif evidence.learning:
        text += f"; {evidence.learning} bucket{'s' if evidence.learning > 1 else ''} still learning"
    return text + "."


def _more(count: int) -> str:
    return f" (and {count - 1} more)" if count > 1 else ""
