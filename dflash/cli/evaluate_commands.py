"""`python -m dflash evaluate ...`: measure acceptance, summarise and compare runs."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash import stages
from dflash.cli.arguments import add_command, add_run_dir
from dflash.cli.output import emit, progress_printer
from dflash.errors import ConfigError
from dflash.evaluate.describe import evaluation_text
from dflash.records import EvaluationResult, RivalTable, to_dict

ENGINE_NAMES = ("vllm", "sglang")


def register(groups: Any) -> None:
    """Add the `evaluate` and `compare` commands."""
    evaluate = add_command(
        groups, "evaluate", "decode held-out prompts, lossless, beside plain decoding; write the summary", _evaluate
    )
    add_run_dir(evaluate)
    which = evaluate.add_mutually_exclusive_group()
    which.add_argument("--checkpoint", type=Path, help="evaluate only this checkpoint folder")
    which.add_argument("--drafter", type=Path, help="evaluate only this published drafter (any layout), on the run's prompts")
    which.add_argument(
        "--sweep", action="store_true", help="only find the fastest block size, batch size and temperature of this machine"
    )
    which.add_argument(
        "--engine", choices=ENGINE_NAMES, help="evaluate the drafter that a server of this kind runs, at --url; decode nothing here"
    )
    which.add_argument(
        "--print-serve-command", choices=ENGINE_NAMES, help="only print how to start such a server with the exported drafter"
    )
    evaluate.add_argument("--url", help="with --engine: address of the server, e.g. http://127.0.0.1:8000")
    evaluate.add_argument("--plain-url", help="with --engine: the same engine without a drafter, to judge losslessness by")
    evaluate.add_argument(
        "--baseline", dest="baselines", action="append", default=[], metavar="NAME", help="decode this beside the trained drafter: "
        "prompt_lookup, untrained, or the folder of a published drafter, a checkpoint or a run (may be repeated)",
    )  # fmt: skip
    evaluate.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE",
        help="a key of the section evaluate for this call alone, e.g. evaluate.sweep.num_prompts=32 (may be repeated); the result "
        "lies beside the run's own",
    )  # fmt: skip
    compare = add_command(groups, "compare", "trained runs side by side: verdict, curves, acceptance, differences", _compare)
    compare.add_argument(
        "run_dirs", type=Path, nargs="*", metavar="RUN", help="folders of two or more runs; the first is the reference"
    )
    compare.add_argument(
        "--output", type=Path, help="folder for the page and the numbers (default: comparisons/ beside the first run)"
    )
    compare.add_argument("--no-tracking", action="store_true", help="leave MLflow alone")
    compare.add_argument(
        "--reference", action="store_true", help="put any number of runs beside what others have published, on their hardware"
    )
    compare.add_argument("--markdown", action="store_true", help="with --reference: print the page of the documentation")


def _evaluate(arguments: argparse.Namespace) -> int:
    run = stages.reopen_run(arguments.run_dir, overrides=_overrides(arguments))
    if arguments.print_serve_command is not None:
        return _serve_commands(arguments, run)
    show = progress_printer()
    if arguments.engine is not None or arguments.url or arguments.plain_url:
        return _tell(arguments, _served(arguments, run, show))
    if arguments.drafter is not None:
        return _tell(arguments, stages.evaluate_published(run, arguments.drafter, progress=show))
    if arguments.sweep:
        sweep = stages.sweep_stage(run, stages.open_sweep_bench(run), progress=show)
        emit(arguments, to_dict(sweep), stages.sweep_text(sweep))
        return 0
    bench = stages.open_bench(run)
    if arguments.checkpoint is not None or stages.settings_of_call(run):
        # The run's summary tells of its newest checkpoint, with what its own configuration asks for.
        result = stages.evaluate_stage(run, bench, which="trained", progress=show, checkpoint=arguments.checkpoint)
        return _tell(arguments, result, stages.baselines_of(run, result))
    for which in ("untrained", "trained"):
        stages.evaluate_stage(run, bench, which=which, progress=show)
    summary = stages.summarise_stage(run)
    emit(arguments, to_dict(summary), stages.closing_text(run, summary))
    return 0


def _served(arguments: argparse.Namespace, run: stages.Run, show: Callable[[str, int, int], None]) -> EvaluationResult:
    if arguments.engine is None or arguments.url is None:
        raise ConfigError(
            "a server is evaluated by --engine and --url together",
            remedy="e.g. --engine vllm --url http://127.0.0.1:8000; --print-serve-command vllm says how to start one",
        )
    return stages.evaluate_served_stage(
        run, engine=arguments.engine, url=arguments.url, plain_url=arguments.plain_url, progress=show
    )  # fmt: skip


def _serve_commands(arguments: argparse.Namespace, run: stages.Run) -> int:
    from dflash.evaluate.served_launch import shell_line  # httpx and torch are not needed for the help

    commands = stages.serve_command_stage(run, engine=arguments.print_serve_command)
    notes = "".join(f"# {note}\n" for note in commands.notes)
    text = f"{notes}{shell_line(commands.speculative)}\n\n# without the drafter, for --plain-url\n{shell_line(commands.plain)}"
    emit(arguments, {"engine": arguments.print_serve_command, **dataclasses.asdict(commands)}, text)
    return 0


def _overrides(arguments: argparse.Namespace) -> list[str]:
    """What this call decodes otherwise than the run's configuration says; nothing else of it can be changed.

    Raises:
        ConfigError: a key of another section, or baselines for a call that decodes none.
    """
    for setting in arguments.settings:
        if not setting.startswith("evaluate."):
            raise ConfigError(
                f"--set {setting}: only keys of the section evaluate can be set here",
                remedy="what a run was trained with stands in its config.yaml and stays",
            )
    other = arguments.sweep or arguments.engine or arguments.print_serve_command or arguments.drafter
    if arguments.baselines and other:
        raise ConfigError(
            "--baseline is decoded beside the run's own drafter, and only there: not with --sweep, --drafter, --engine or "
            "--print-serve-command",
            remedy="evaluate it in a call of its own",
        )
    named = [f"evaluate.baselines={json.dumps(arguments.baselines)}"] if arguments.baselines else []
    return [*arguments.settings, *named]


def _tell(arguments: argparse.Namespace, result: EvaluationResult, baselines: RivalTable | None = None) -> int:
    payload, text = to_dict(result), evaluation_text(result)
    if baselines is not None:
        from dflash.evaluate.rivals import rival_lines  # torch is not needed for the help

        payload["baselines"] = to_dict(baselines)
        text = "\n".join([text, "", *rival_lines(baselines)])
    emit(arguments, payload, text)
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    if arguments.reference:
        beside = stages.reference_stage(arguments.run_dirs)
        emit(arguments, beside.payload, beside.page.rstrip("\n") if arguments.markdown else beside.text)
        return 0
    found = stages.compare_stage(arguments.run_dirs, output=arguments.output, track=not arguments.no_tracking)
    emit(arguments, found.payload, f"{found.text}\n\npage: {found.page}")
    return 0
