"""A log that has stopped growing while the run is meant to be alive. The clock is an argument, never read here."""

from __future__ import annotations

from collections.abc import Sequence

from dflash.config import HealthConfig
from dflash.health.context import RunContext
from dflash.records import DetectorSummary, Finding, Severity

NAME = "stale log"
FUTURE_S = 300.0
"""How far behind now a record may be dated before two clocks are said to disagree."""

_WALL_CLOCK_S = 1e9


def silence_limit_s(health: HealthConfig, context: RunContext) -> float:
    """Seconds without a sign of life from the trainer after which nothing can be said of the run."""
    return max(health.stale_min_s, health.stale_factor * (context.step_time_median_s() or 0.0))


def silent_from_s(health: HealthConfig, context: RunContext, *, ended: bool) -> float | None:
    """Wall time from which silence is a finding, None if it is none however long it lasts."""
    if ended or context.finished or context.last_life_s is None:
        return None
    return context.last_life_s + silence_limit_s(health, context)


def stale_finding(health: HealthConfig, context: RunContext, *, now_s: float, ended: bool, last_step: int) -> Finding | None:
    """A critical finding of operations if the trainer has been silent for too long.

    Args:
        health: thresholds.
        context: what the run showed last.
        now_s: wall time, in the log's clock.
        ended: the run has ended, so silence is right.
        last_step: newest live step, -1 if none.
    """
    from_s = silent_from_s(health, context, ended=ended)
    if from_s is None or context.last_life_s is None or now_s <= from_s:
        return None
    silent_s = now_s - context.last_life_s
    limit_s = silence_limit_s(health, context)
    message = f"no sign of the trainer for {silent_s:.0f} s; {limit_s:.0f} s is the limit"
    return _finding("critical", message, last_step=last_step, values={"silent_s": silent_s, "limit_s": limit_s})


def future_finding(context: RunContext, *, now_s: float, last_step: int) -> Finding | None:
    """A warning if the newest sign of life is dated behind now; times that count from the run's own beginning say nothing."""
    ahead_s = (context.last_life_s or 0.0) - now_s
    if ahead_s <= FUTURE_S or now_s < _WALL_CLOCK_S:
        return None
    message = f"the newest record is dated {ahead_s:.0f} s in the future: two clocks disagree, so silence cannot be told"
    return _finding("warn", message, last_step=last_step, values={"ahead_s": ahead_s})


def _finding(severity: Severity, message: str, *, last_step: int, values: dict[str, float]) -> Finding:
    step = max(last_step, 0)
    return Finding(
        detector=NAME,
        severity=severity,
        domain="operations",
        message=message,
        first_step=step,
        last_step=step,
        onset_step=step,
        bucket=None,
        values=values,
        batch_ids=(),
    )


def staleness_summary(health: HealthConfig, context: RunContext, *, found: Sequence[Finding], ended: bool) -> DetectorSummary:
    """What the check for silence looked at."""
    return DetectorSummary(
        detector=NAME,
        rule=f"no record for {health.stale_factor:g} median step times (at least {health.stale_min_s:g} s) while the run lives",
        checked=context.steps,
        findings=len(found),
        critical=sum(finding.severity == "critical" for finding in found),
        note="the run has ended" if ended or context.finished else "",
    )
