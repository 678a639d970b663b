"""`python -m dflash health RUN`: judge a run's log. Exit 0 healthy or watch, 20 unhealthy, 22 blind."""

from __future__ import annotations

import argparse
from typing import Any

from dflash.cli.arguments import add_command, add_run_dir
from dflash.cli.output import emit
from dflash.errors import EXIT_BLIND, EXIT_OK, EXIT_UNHEALTHY
from dflash.health import render_text
from dflash.records import to_dict
from dflash.stages import health_stage

EXIT_CODES = {"healthy": EXIT_OK, "watch": EXIT_OK, "unhealthy": EXIT_UNHEALTHY, "blind": EXIT_BLIND}


def register(groups: Any) -> None:
    """Add the `health` command."""
    parser = add_command(groups, "health", "check a run's training log; changes nothing in the run unless --act", _health)
    add_run_dir(parser)
    parser.add_argument("--act", action="store_true", help="hand a decision to the run's supervisor")


def _health(arguments: argparse.Namespace) -> int:
    report = health_stage(arguments.run_dir, act=arguments.act, ended=None)
    emit(arguments, to_dict(report), render_text(report))
    return EXIT_CODES[report.verdict]
