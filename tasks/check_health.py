"""Tasks: whether a run's log is that of a healthy training."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from prefect import task

from dflash.errors import DflashError, UnhealthyError
from dflash.records import HealthReport, RunPaths
from dflash.stages import Revival, health_pictures, health_stage
from tasks.events import decision_event
from tasks.policies import NEVER_CACHED, SHORT_TIMEOUT_S, is_transient
from tasks.reporting import markdown, picture

logger = logging.getLogger(__name__)


@task(
    name="check-health",
    retries=1,
    retry_delay_seconds=5,
    retry_condition_fn=is_transient,
    timeout_seconds=SHORT_TIMEOUT_S,
    **NEVER_CACHED,
)
def check_health(run_dir: str, *, act: bool, ended: bool | None) -> HealthReport:
    """Judge a run's log; with `act`, ask its live supervisor to carry out what the check decides."""
    report = health_stage(run_dir, act=act, ended=ended)
    if act and report.decision is not None:
        decision_event(report.run, report.decision)
    markdown("health", health_text(report), description=f"{report.run}: {report.verdict}")
    for file in health_pictures(RunPaths(Path(run_dir)))[:1]:
        picture("health-loss", file.read_bytes(), kept_in=str(file), description=f"{report.run}: loss with what was found")
    return report


def check_each(run_dirs: Sequence[str], revivals: Sequence[Revival], *, act: bool) -> list[HealthReport]:
    """Judge runs one after the other; one that cannot be judged fails the flow, after all others have been.

    Raises:
        UnhealthyError: see `require_healthy`.
        DflashError, OSError: all that were judged are healthy, but one could not be.
    """
    reports: list[HealthReport] = []
    errors: list[DflashError | OSError] = []
    for run_dir in run_dirs:
        try:
            reports.append(check_health(run_dir, act=act, ended=None))
        except (DflashError, OSError) as error:
            logger.error("%s cannot be judged: %s", run_dir, error)
            errors.append(error)
    require_healthy(reports, revivals)
    if errors:
        raise errors[0]
    return reports


def health_text(report: HealthReport) -> str:
    """A report as Markdown: the verdict, what was found, and what was looked at."""
    lines = [f"## {report.run}: {report.verdict}", "", report.headline, ""]
    lines += [
        f"- **{finding.severity}** {finding.detector} at step {finding.onset_step}: {finding.message}"
        for finding in report.findings
    ]
    if report.decision is not None:
        lines += ["", f"Decision: **{report.decision.action}**, {report.decision.reason}"]
    lines += ["", "| detector | findings | critical | checked | rule |", "|---|---|---|---|---|"]
    lines += [f"| {d.detector} | {d.findings} | {d.critical} | {d.checked} | {d.rule} |" for d in report.detectors]
    return "\n".join(lines) + "\n"


def require_healthy(reports: Sequence[HealthReport], revivals: Sequence[Revival] = ()) -> None:
    """Make an unhealthy run a failed flow, and one that has died and that nobody goes on with.

    Raises:
        UnhealthyError: at least one report says so; the message is the reports' headlines.
    """
    bad = [f"{report.run}: {report.headline}" for report in reports if report.verdict == "unhealthy"]
    bad += [f"{revival.run}: {revival.reason}" for revival in revivals if revival.loud]
    if bad:
        text = "; ".join(bad)
        raise UnhealthyError(text, remedy="read health/report.html in the run's folder")
