"""`python -m dflash publish|select|champion`: drafters for others, and checkpoints for the registry."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from dflash import stages
from dflash.cli.arguments import add_command, add_run_dir
from dflash.cli.export_commands import DTYPE_NAMES, LAYOUT_NAMES
from dflash.cli.output import emit, progress_printer
from dflash.errors import EXIT_OK
from dflash.evaluate.text import clean_text
from dflash.records import RegisteredDrafter


def register(groups: Any) -> None:
    """Add the `publish`, `select` and `champion` commands."""
    publish = add_command(
        groups, "publish", "export, audit and describe a drafter for others; --register makes it a version in MLflow", _publish
    )
    publish.add_argument("source", type=Path, help="a run's folder (its best checkpoint, else the newest) or a checkpoint's folder")
    publish.add_argument("overrides", nargs="*", metavar="publish.KEY=VALUE", help="e.g. publish.license=apache-2.0")
    publish.add_argument("--layout", choices=LAYOUT_NAMES, default="zlab", help="published layout")
    publish.add_argument("--dtype", choices=DTYPE_NAMES, help="of the weights; float32 for a CPU run, bfloat16 else")
    publish.add_argument("--output", type=Path, help="folder to make (default: published/LAYOUT in the run's folder)")
    publish.add_argument("--register", action="store_true", help="register it in MLflow; it may take the champion's place")
    select = add_command(
        groups, "select", "probe a run's due checkpoints; the best is registered and challenges the champion", _select
    )
    add_run_dir(select)
    select.add_argument("--no-register", action="store_true", help="leave MLflow's registry alone")
    champion = add_command(groups, "champion", "the registry's best drafter for a run's target; --output fetches it", _champion)
    add_run_dir(champion)
    champion.add_argument("--output", type=Path, help="new folder for its files, as a baseline or to be served")


def _publish(arguments: argparse.Namespace) -> int:
    request = stages.PublishRequest(
        source=arguments.source,
        output=arguments.output,
        layout=arguments.layout,
        dtype=arguments.dtype,
        overrides=arguments.overrides,
        register=arguments.register,
    )
    done = stages.publish_stage(request, progress=progress_printer())
    text = (
        f"step {done.step} is in {done.folder} ({done.layout} layout, {done.dtype}): {len(done.checks)} checks passed, card written"
    )
    emit(arguments, dataclasses.asdict(done), "\n".join([text, *_registered(done.registered)]))
    return EXIT_OK


def _select(arguments: argparse.Namespace) -> int:
    if arguments.own_process:
        stages.give_way(arguments.run_dir)
    found = stages.select_stage(arguments.run_dir, register=not arguments.no_register)
    best = "no due checkpoint could be measured" if found.best is None else f"step-{found.best} is the best checkpoint by its probe"
    emit(arguments, dataclasses.asdict(found), "\n".join([best, *_registered(found.registered)]))
    return EXIT_OK


def _champion(arguments: argparse.Namespace) -> int:
    found = stages.champion_of(stages.reopen_run(arguments.run_dir), output=arguments.output)
    lines = [
        f"{found.model} version {found.version}: step {found.step} of {found.run}, acceptance length {found.acceptance_length}",
        f"why: {found.reason}",
    ]
    if found.folder is not None:
        lines.append(f"its files are in {found.folder}")
    emit(arguments, dataclasses.asdict(found), "\n".join(map(clean_text, lines)))
    return EXIT_OK


def _registered(done: RegisteredDrafter | None) -> list[str]:
    if done is None:
        return []
    state = "champion" if done.champion else "not the champion"
    return [f"{done.model} version {done.version}{'' if done.created else ' (known already)'}: {state}; {done.ruling.reason}"]
