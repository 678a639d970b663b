"""The health stage: check a run's log and, where asked, turn a decision into a request to its supervisor."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime
from pathlib import Path

from dflash.checkpoint import read_ledger, saved_states
from dflash.data.plan_file import read_plan_manifest
from dflash.errors import RunStateError
from dflash.health import PICTURES_FOLDER, Remedy, check_run, critical_training_spans
from dflash.records import ControlRequest, Damage, HealthReport, RollbackPlan, RunPaths, from_json
from dflash.rollback import Situation, decide
from dflash.stages.run import Run, reopen_run
from dflash.storage import alone
from dflash.train.requests import ask
from dflash.train.runs import run_is_live

logger = logging.getLogger(__name__)


def health_stage(run_dir: str | Path, *, act: bool, ended: bool | None) -> HealthReport:
    """Read what is new in a run's log and judge the run.

    Args:
        run_dir: the run's folder.
        act: write a request to the supervisor if the check decides something and a supervisor lives.
        ended: whether the log is complete; None finds out from the run's lock and summary.

    Returns:
        The report, also written into the run's `health/`.
    """
    run = reopen_run(run_dir)
    paths = run.paths
    live = run_is_live(paths)
    finished = not live if ended is None else ended
    with alone(paths.health_dir / "lock"):  # a second at most; two checks at once would interleave their state
        report = check_run(paths, run.config, now_s=time.time(), ended=finished, remedy=_remedy(run, alive=live))
        if act and live and report.decision is not None:
            _request(paths, report, report.decision)
    return report


def critical_spans(paths: RunPaths) -> tuple[tuple[int, int], ...]:
    """Check the log up to now and return (onset, last evidence) steps of its critical training findings.

    Nothing is asked for here: it is the evidence from which the supervisor learns which checkpoints are clean, and a decision
    that came before that would go back further than it has to.
    """
    report = health_stage(paths.root, act=False, ended=False)
    return tuple(critical_training_spans(report))


def health_pictures(paths: RunPaths) -> list[Path]:
    """The pictures of the last drawn report, the loss first."""
    return sorted((paths.health_dir / PICTURES_FOLDER).glob("*.png"), key=lambda file: (file.stem != "loss", file.name))


def load_report(paths: RunPaths) -> HealthReport:
    """The report of the last check.

    Raises:
        RunStateError: the run was never checked.
    """
    file = paths.health_dir / "report.json"
    if not file.is_file():
        raise RunStateError(f"run {paths.root} has no health report", remedy=f"python -m dflash health {paths.root}")
    return from_json(HealthReport, file.read_bytes(), origin=str(file))


def _remedy(run: Run, *, alive: bool) -> Remedy:
    """What the run's ledger, checkpoints and plan allow to be done about damage."""

    def remedy(damage: Damage) -> RollbackPlan | None:
        situation = Situation(
            run=run.paths.root.name,
            ledger=read_ledger(run.paths.ledger),
            saved=saved_states(run.paths.checkpoints_dir),
            batches_per_epoch=min(read_plan_manifest(run.paths.plan_dir).batches_per_epoch),
            alive=alive,
            now_s=time.time(),
        )
        return decide(damage, situation, rule=run.config.rollback)

    return remedy


def _request(paths: RunPaths, report: HealthReport, decision: RollbackPlan) -> None:
    file = paths.requests_dir / f"{decision.key}.json"
    if file.exists():
        return
    request = ControlRequest(
        key=decision.key,
        action=decision.action,
        reason=decision.reason,
        requested_at=datetime.now(UTC).isoformat(timespec="seconds"),
        requested_by="health-check",
        plan=decision,
    )
    if not ask(paths, request):
        return  # another check of the same segment was first, and its request stands
    logger.warning("health check asks the supervisor of %s to %s: %s", report.run, decision.action, decision.reason)
