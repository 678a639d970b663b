"""Task: training under its supervisor."""

from __future__ import annotations

from prefect import runtime, task

from dflash.errors import DataError, HaltedError, RunStateError
from dflash.records import RunPaths
from dflash.stages import TrainStage, load_report, reopen_run, train_stage
from dflash.train.progress import TrainProgress
from tasks.due_checkpoints import DueCheckpoints
from tasks.own_state import OwnState
from tasks.policies import NEVER_CACHED
from tasks.progress import ProgressReport
from tasks.reporting import markdown

REPORT_LINES = 5
"""Critical findings that a halted flow run's message names."""


# No retries (the checkpoints resume) and no timeout (a training may take weeks; the health check watches it).
@task(name="train", retries=0, **NEVER_CACHED)
def train_drafter(run_dir: str) -> TrainStage:
    """Train to the end of the plan, continuing from the newest durable checkpoint if there is one."""
    run = reopen_run(run_dir)
    flow_run = None if runtime.flow_run.id is None else str(runtime.flow_run.id)
    due = DueCheckpoints(run)
    with ProgressReport("training-progress") as report, OwnState(run.paths, flow_run):

        def on_progress(progress: TrainProgress) -> None:
            due.tell()
            if progress.total_steps:  # zero until the trainer has started
                report.show("training", progress.step, progress.total_steps, detail=_detail(progress))

        try:
            outcome = train_stage(run, on_progress=on_progress)
        except HaltedError as error:
            raise _loud(error, run.paths) from error
    incidents = f"{outcome.restarts} | {outcome.rollbacks}"
    cells = f"{outcome.steps} | {outcome.train_time_s:.0f} s | {outcome.wait_frac:.1%} | {incidents} | `{outcome.checkpoint}`"
    text = f"| steps | time | waited for features | restarts | rollbacks | checkpoint |\n|---|---|---|---|---|---|\n| {cells} |\n"
    markdown("training", text, description=f"{outcome.steps} steps in {outcome.train_time_s:.0f} s")
    return outcome


def _loud(error: HaltedError, paths: RunPaths) -> HaltedError:
    """A halt with the first lines of the health report, so that the flow run's state says what happened without a click."""
    try:
        report = load_report(paths)
    except (RunStateError, DataError):
        return error
    critical = [finding for finding in report.findings if finding.severity == "critical"][:REPORT_LINES]
    lines = [f"{report.verdict}: {report.headline}"]
    lines += [f"{finding.detector} at step {finding.onset_step}: {finding.message}" for finding in critical]
    return HaltedError("\n".join((error.what, *lines)), remedy=error.remedy)


def _detail(progress: TrainProgress) -> str:
    """Loss, acceptance, speed, time left: what fits on 80 columns."""
    known = (
        ("loss {:.2f}", progress.ce),
        ("acc {:.2f}", progress.accepted_length),
        ("{:.0f} tok/s", progress.tokens_per_s),
        ("eta {:.0f}s", progress.eta_s),
    )
    return " ".join(form.format(value) for form, value in known if value is not None)
