"""Tasks: which runs are being trained, and whether a run's log is that of a healthy training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefect import task

from dflash.config import load_config
from dflash.errors import UnhealthyError
from dflash.records import HealthReport, RunPaths
from dflash.stages import Revival, health_pictures, health_stage, list_runs, revive_stage
from dflash.train.attempts import any_unsettled
from dflash.train.runs import run_is_live
from tasks.events import decision_event, died_event
from tasks.flow_runs import PrefectFlowRuns
from tasks.policies import NEVER_CACHED, SHORT_TIMEOUT_S, is_transient
from tasks.reporting import markdown, picture, table


@task(name="find-live-runs", timeout_seconds=SHORT_TIMEOUT_S, tags=["dflash"], **NEVER_CACHED)
def find_live_runs(config: str, *, overrides: list[str], run: str | None) -> list[str]:
    """Folders of the configuration's runs that a supervisor trains right now, or the one that is named."""
    settings = load_config(config, overrides=overrides).run
    if run is not None:
        return [str(Path(settings.root) / run)]
    return [folder for folder in _own_runs(settings.root, settings.name) if run_is_live(RunPaths(Path(folder)))]


def _own_runs(root: str, name: str) -> list[str]:
    return [str(folder) for folder in list_runs(root) if folder.name.rpartition("-")[0] == name]


@task(name="revive-runs", timeout_seconds=SHORT_TIMEOUT_S, tags=["dflash", "health"], **NEVER_CACHED)
def revive_runs(config: str, *, overrides: list[str], run: str | None) -> list[Revival]:
    """Bring back the configuration's runs whose flow has died without a word, each death once."""
    settings = load_config(config, overrides=overrides).run
    folders = _own_runs(settings.root, settings.name) if run is None else [str(Path(settings.root) / run)]
    unsettled = [folder for folder in folders if any_unsettled(RunPaths(Path(folder)))]
    revivals = [revival for folder in unsettled for revival in revive_stage(folder, server=PrefectFlowRuns())]
    for revival in revivals:
        died_event(revival)
    if revivals:
        rows = [
            {"run": item.run, "dead flow run": item.flow_run, "continued by": item.continued_by, "why": item.reason}
            for item in revivals
        ]
        table("revived", rows, description=f"runs whose flow had died: {len(rows)}")
    return revivals


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
    if act and report.decision is not None:
        decision_event(report.run, report.decision)
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
