"""A report on the newer part of a run only: what lies wholly before a step no longer counts."""

from __future__ import annotations

from dataclasses import replace

from dflash.health.decision import is_damage
from dflash.health.verdict import Evidence, judge
from dflash.records import HealthReport


def narrowed(report: HealthReport, *, since_step: int, min_coverage_frac: float) -> HealthReport:
    """The report without findings whose last evidence lies before `since_step`, judged again.

    The baselines are those of the whole log, and so is the coverage: only what is shown and judged is narrowed.
    """
    findings = tuple(finding for finding in report.findings if finding.last_step >= since_step)
    last_step = -1 if report.last_step is None else report.last_step
    verdict, headline = judge(
        Evidence(
            findings=findings,
            steps=report.records,
            last_step=last_step,
            coverage_frac=report.coverage_frac,
            loss_points=report.records,
            learning=0,
            recent_steps=max(last_step - since_step + 1, 1),
            min_coverage_frac=min_coverage_frac,
            ended=False,
        )
    )
    damaged = any(is_damage(finding) for finding in findings)
    return replace(
        report,
        verdict=verdict,
        headline=headline,
        findings=findings,
        damage=report.damage if damaged else None,
        decision=report.decision if damaged else None,
    )
