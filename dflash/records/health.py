"""Records of the health room: findings, verdict, control request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dflash.records.rollback import Damage, RollbackPlan

HEALTH_SCHEMA_VERSION = 2

Severity = Literal["info", "warn", "critical"]
Domain = Literal["training", "operations", "diagnosis"]
Verdict = Literal["healthy", "watch", "unhealthy", "blind"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a detector saw.

    Attributes:
        domain: only critical findings of `training` make weights dirty or lead to a decision.
        first_step, last_step: record steps concerned.
        onset_step: where the deviation began (not where it was noticed).
        values: evidence: the value, its baseline, z, counts.
        batch_ids: plan positions concerned.
    """

    detector: str
    severity: Severity
    domain: Domain
    message: str
    first_step: int
    last_step: int
    onset_step: int
    bucket: int | None
    values: Mapping[str, Any]
    batch_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DetectorSummary:
    """What one detector looked at: a report that says nothing was found must say what was checked."""

    detector: str
    rule: str
    checked: int
    findings: int
    critical: int
    note: str


@dataclass(frozen=True, slots=True)
class HealthReport:
    """The verdict on a run's log at one moment.

    Attributes:
        damage: what is damaged, None while nothing is.
        decision: what should be done about it; None without damage, and while a rollback of this segment is under way or
            has to wait. Written, not executed, by the checker.
    """

    run: str
    verdict: Verdict
    headline: str
    checked_at: str
    segment: int
    first_step: int | None
    last_step: int | None
    records: int
    coverage_frac: float
    detectors: tuple[DetectorSummary, ...]
    findings: tuple[Finding, ...]
    damage: Damage | None
    decision: RollbackPlan | None
    stats: Mapping[str, Any]
    schema_version: int = HEALTH_SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """A request to a run's supervisor: a file that is created once under its key and acknowledged.

    Attributes:
        plan: of a `rollback`, and of the halt that stands in the place of one; None for what a person asks.
    """

    key: str
    action: Literal["rollback", "halt", "stop"]
    reason: str
    requested_at: str
    requested_by: str
    plan: RollbackPlan | None = None
    schema_version: int = HEALTH_SCHEMA_VERSION
