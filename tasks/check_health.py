"""Tasks: which runs are being trained, and whether a run's log is that of a healthy training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefect import task

from dflash.config import load_config
from dflash.errors import UnhealthyError
from dflash.records import HealthReport, RunPaths
from dflash.stages import health_pictures, health_stage, list_runs
from dflash.train.runs import run_is_live
from tasks.policies import NEVER_CACHED, SHORT_TIMEOUT_S, is_transient
from tasks.reporting import markdown, picture


@task(name="find-live-runs", timeout_seconds=SHORT_TIMEOUT_S, tags=["dflash"], **NEVER_CACHED)
def find_live_runs(config: str, *, overrides: list[str], run: str | None) -> list[str]:
    """Folders of the configuration's runs that a supervisor trains right now, or the one that is named."""
    settings = load_config(config, overrides=overrides).run
    if run is not None:
        return [str(Path(settings.root) / run)]
    own = [folder for folder in list_runs(settings.root) if folder.name.rpartition("-")[0] == settings.name]
    return [str(folder) for folder in own if run_is_live(RunPaths(folder))]


@task(
    name="check-health",
    retries=1,
    retry_delay_seconds=5,
    retry_condition_fn=is_transient,
    timeout_seconds=SHORT_TIMEOUT_S,
    tags=["dflash", "health"],
    **NEVER_CACHED,
)
def check_health(run_dir: str, *, act: bool, ended: bool | None) -> HealthReport:
    """Judge a run's log; with `act`, ask its live supervisor to carry out what the check decides."""
    report = health_stage(run_dir, act=act, ended=ended)
    markdown("health", health_text(report), description=f"{report.run}: {report.verdict}")
    for file in health_pictures(RunPaths(Path(run_dir)))[:1]:
        picture("health-loss", file.read_bytes(), kept_in=str(file), description=f"{report.run}: loss with what was found")
    return report


def health_text(report: HealthReport) -> str:
    """A report as Markdown: the verdict, what was found, and what was looked at."""
    lines = [f"## {report.run}: {report.verdict}", "", report.headline, ""]
    lines += [
        f"- **{finding.severity}** {finding.detector} at step {finding.onset_step}: {finding.message}"
        for finding in report.findings
    ]
    if report.decision is not None:
        lines += ["", f"Decision: **{report.decision.action}**, {report.decision.reason}"]
    lines += ["", "| detector | rule | checked | findings | critical |", "|---|---|---|---|---|"]
    lines += [f"| {d.detector} | {d.rule} | {d.checked} | {d.findings} | {d.critical} |" for d in report.detectors]
    return "\n".join(lines) + "\n"


def require_healthy(reports: Sequence[HealthReport]) -> None:
    """Make an unhealthy run a failed flow.

    Raises:
        UnhealthyError: at least one report says so; the message is the reports' headlines.
    """
    bad = [report for report in reports if report.verdict == "unhealthy"]
    if bad:
        text = "; ".join(f"{report.run}: {report.headline}" for report in bad)
        raise UnhealthyError(text, remedy="read health/report.html in the run's folder")
