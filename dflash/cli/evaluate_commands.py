"""`python -m dflash evaluate ...`: measure acceptance, summarise and compare runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dflash import stages
from dflash.cli.arguments import add_command, add_run_dir
from dflash.cli.output import emit, progress_printer
from dflash.records import EvaluationResult, to_dict


def register(groups: Any) -> None:
    """Add the `evaluate` and `compare` commands."""
    evaluate = add_command(
        groups, "evaluate", "decode held-out prompts, lossless, beside plain decoding; write the summary", _evaluate
    )
    add_run_dir(evaluate)
    which = evaluate.add_mutually_exclusive_group()
    which.add_argument("--checkpoint", type=Path, help="evaluate only this checkpoint folder")
    which.add_argument("--drafter", type=Path, help="evaluate only this published drafter (any layout), on the run's prompts")
    compare = add_command(groups, "compare", "trained runs side by side: verdict, curves, acceptance, differences", _compare)
    compare.add_argument(
        "run_dirs", type=Path, nargs="+", metavar="RUN", help="folders of two or more runs; the first is the reference"
    )
    compare.add_argument(
        "--output", type=Path, help="folder for the page and the numbers (default: comparisons/ beside the first run)"
    )
    compare.add_argument("--no-tracking", action="store_true", help="leave MLflow alone")


def _evaluate(arguments: argparse.Namespace) -> int:
    run = stages.reopen_run(arguments.run_dir)
    show = progress_printer()
    if arguments.drafter is not None:
        return _tell(arguments, stages.evaluate_published(run, arguments.drafter, progress=show))
    bench = stages.open_bench(run)
    if arguments.checkpoint is not None:
        return _tell(arguments, stages.evaluate_stage(run, bench, which="trained", progress=show, checkpoint=arguments.checkpoint))
    for which in ("untrained", "trained"):
        stages.evaluate_stage(run, bench, which=which, progress=show)
    summary = stages.summarise_stage(run)
    emit(arguments, to_dict(summary), stages.closing_text(run, summary))
    return 0


def _tell(arguments: argparse.Namespace, result: EvaluationResult) -> int:
    low, high = result.acceptance_ci
    text = f"acceptance length {result.acceptance_length:.2f} [{low:.2f}, {high:.2f}], lossless: {result.lossless}"
    emit(arguments, to_dict(result), text)
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    found = stages.compare_stage(arguments.run_dirs, output=arguments.output, track=not arguments.no_tracking)
    emit(arguments, found.payload, f"{found.text}\n\npage: {found.page}")
    return 0
