"""`python -m dflash train CONFIG`: prepare, plan and train under the supervisor, without Prefect."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from dflash import stages
from dflash.cli.arguments import add_command, add_config, read_config
from dflash.cli.output import emit, progress_printer
from dflash.cli.trace_commands import write_trace
from dflash.config import Config
from dflash.errors import RunStateError
from dflash.records import RunPaths
from dflash.stages.run import newest_run
from dflash.train.changes import accept_changes
from dflash.train.progress import TrainProgress


def register(groups: Any) -> None:
    """Add the `train` command."""
    parser = add_command(groups, "train", "prepare, plan and train; continues an unfinished run of the same config", _train)
    add_config(parser)
    parser.add_argument(
        "--accept-changes",
        action="store_true",
        help="let the newest unfinished run go on with a changed configuration (e.g. other replicas); noted in the run",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="at the end also write the run's timeline, as `trace` does")


def _accept_changes(config: Config) -> None:
    name = newest_run(config)
    if name is None:
        raise RunStateError(
            f"there is no run {config.run.name} under {config.run.root} to continue", remedy="leave --accept-changes out"
        )
    accept_changes(config, RunPaths(Path(config.run.root) / name))


def _train(arguments: argparse.Namespace) -> int:
    config = read_config(arguments)
    if arguments.accept_changes:
        _accept_changes(config)
    run = stages.open_run(config)
    show = progress_printer()
    data = stages.prepare_stage(run, progress=show)
    plan = stages.plan_stage(run, data)

    def on_progress(progress: TrainProgress) -> None:
        if progress.total_steps:  # zero until the trainer has started
            show("training (steps)", progress.step, progress.total_steps)

    outcome = stages.train_stage(run, on_progress=on_progress)
    payload = {"run": str(run.paths.root), "resumed": run.resumed} | dataclasses.asdict(outcome)
    emit(
        arguments,
        payload,
        f"{run.paths.root}: {outcome.steps} steps in {outcome.train_time_s:.0f} s, waited for features "
        f"{outcome.wait_frac:.1%} of the time, padding efficiency {plan.manifest.padding_efficiency:.3f}\n"
        f"{outcome.stages}\n"
        f"checkpoint {outcome.checkpoint}\nnext: python -m dflash evaluate {run.paths.root}",
    )
    if arguments.trace is not None:  # last: what a viewer cannot open must not hide what was trained
        write_trace(run.paths, arguments.trace, first_step=0, end_step=None)
    return 0
