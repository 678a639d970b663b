"""`python -m dflash train CONFIG`: prepare, plan and train under the supervisor, without Prefect."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from dflash.cli.arguments import add_command, add_config, read_config
from dflash.cli.output import emit, progress_printer
from dflash.stages import open_run, plan_stage, prepare_stage, train_stage
from dflash.train.progress import TrainProgress


def register(groups: Any) -> None:
    """Add the `train` command."""
    add_config(add_command(groups, "train", "prepare, plan and train; continues an unfinished run of the same config", _train))


def _train(arguments: argparse.Namespace) -> int:
    run = open_run(read_config(arguments))
    show = progress_printer()
    data = prepare_stage(run, progress=show)
    plan = plan_stage(run, data)

    def on_progress(progress: TrainProgress) -> None:
        if progress.total_steps:  # zero until the trainer has started
            show("training (steps)", progress.step, progress.total_steps)

    outcome = train_stage(run, on_progress=on_progress)
    payload = {"run": str(run.paths.root), "resumed": run.resumed} | dataclasses.asdict(outcome)
    emit(
        arguments,
        payload,
        f"{run.paths.root}: {outcome.steps} steps in {outcome.train_time_s:.0f} s, waited for features "
        f"{outcome.wait_frac:.1%} of the time, padding efficiency {plan.manifest.padding_efficiency:.3f}\n"
        f"{outcome.stages}\n"
        f"checkpoint {outcome.checkpoint}\nnext: python -m dflash evaluate {run.paths.root}",
    )
    return 0
