"""`python -m dflash config ...`: check a configuration, show it resolved, print the reference."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from dflash.cli.arguments import add_command, add_config, add_group, read_config
from dflash.cli.output import emit
from dflash.config import dump_config, reference_markdown
from dflash.errors import EXIT_OK, EXIT_USER_ERROR
from dflash.storage import atomic_write_text


def register(groups: Any) -> None:
    """Add the `config` group."""
    commands = add_group(groups, "config", "check, show and document configurations")
    add_config(add_command(commands, "check", "validate; print parameter counts and the memory plan", _check))
    add_config(
        add_command(
            commands, "doctor", "check this machine against a configuration: devices, target, inputs, memory, disk", _doctor
        )
    )
    add_config(add_command(commands, "show", "print the resolved configuration, every default written out", _show))
    reference = add_command(commands, "reference", "print the configuration reference as Markdown", _reference)
    reference.add_argument("--output", type=Path, help="write it to this file instead")
    metrics = add_command(
        commands, "metrics", "print the reference of the run log and of the metrics in MLflow as Markdown", _metrics
    )
    metrics.add_argument("--output", type=Path, help="write it to this file instead")


def _check(arguments: argparse.Namespace) -> int:
    from dflash.train.doctor import describe_config  # torch is not needed for the other commands

    config = read_config(arguments)
    plan = describe_config(config)
    emit(arguments, plan.payload, plan.text)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from dflash.train.doctor import render_checks, run_checks

    results = run_checks(read_config(arguments))
    emit(arguments, [dataclasses.asdict(result) for result in results], render_checks(results))
    return EXIT_USER_ERROR if any(result.status == "fail" for result in results) else EXIT_OK


def _show(arguments: argparse.Namespace) -> int:
    config = read_config(arguments)
    emit(arguments, config.model_dump(mode="json"), dump_config(config))
    return 0


def _reference(arguments: argparse.Namespace) -> int:
    return _page(arguments, reference_markdown())


def _metrics(arguments: argparse.Namespace) -> int:
    from dflash.stages.metrics_reference import metrics_markdown

    return _page(arguments, metrics_markdown())


def _page(arguments: argparse.Namespace, text: str) -> int:
    if arguments.output is None:
        emit(arguments, {"markdown": text}, text)
        return 0
    atomic_write_text(arguments.output, text)
    emit(arguments, {"path": str(arguments.output)}, f"wrote {arguments.output}")
    return 0
