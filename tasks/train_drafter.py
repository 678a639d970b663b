"""Task: training under its supervisor."""

from __future__ import annotations

from prefect import task

from dflash.stages import TrainStage, reopen_run, train_stage
from dflash.train.progress import TrainProgress
from tasks.policies import NEVER_CACHED
from tasks.progress import ProgressReport
from tasks.reporting import markdown


# No retries (the checkpoints resume) and no timeout (a training may take weeks; the health check watches it).
@task(name="train", retries=0, tags=["dflash", "training"], **NEVER_CACHED)
def train_drafter(run_dir: str) -> TrainStage:
    """Train to the end of the plan, continuing from the newest durable checkpoint if there is one."""
    with ProgressReport("training-progress") as report:

        def on_progress(progress: TrainProgress) -> None:
            if progress.total_steps:  # zero until the trainer has started
                report.show("training", progress.step, progress.total_steps, detail=_detail(progress))

        outcome = train_stage(reopen_run(run_dir), on_progress=on_progress)
    incidents = f"{outcome.restarts} | {outcome.rollbacks}"
    cells = f"{outcome.steps} | {outcome.train_time_s:.0f} s | {outcome.wait_frac:.1%} | {incidents} | `{outcome.checkpoint}`"
    text = f"| steps | time | waited for features | restarts | rollbacks | checkpoint |\n|---|---|---|---|---|---|\n| {cells} |\n"
    markdown("training", text, description=f"{outcome.steps} steps in {outcome.train_time_s:.0f} s")
    return outcome


def _detail(progress: TrainProgress) -> str:
    """Loss, acceptance, speed, time left: what fits on 80 columns."""
    known = (
        ("loss {:.2f}", progress.ce),
        ("acc {:.2f}", progress.accepted_length),
        ("{:.0f} tok/s", progress.tokens_per_s),
        ("eta {:.0f}s", progress.eta_s),
    )
    return " ".join(form.format(value) for form, value in known if value is not None)
