"""`python -m dflash doctor CONFIG`: everything that would spoil a run, before it starts. Exit 1 if a check failed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dflash.cli.arguments import add_command, add_config, read_config
from dflash.cli.output import emit
from dflash.errors import EXIT_OK, EXIT_USER_ERROR
from dflash.records import RunPaths

OVERFIT_LIMIT_S = 15.0
"""How long one batch may be learnt when a person waits for the answer."""


def register(groups: Any) -> None:
    """Add the `doctor` command."""
    parser = add_command(
        groups, "doctor", "examine machine, target, drafter and data set before a run; under a minute for small targets", _doctor
    )
    add_config(parser)
    parser.add_argument(
        "--run", dest="run_dir", type=Path, help="run whose data set is examined; the newest of this configuration if absent"
    )


def _doctor(arguments: argparse.Namespace) -> int:
    from dflash.stages.doctor import newest_prepared_run  # torch is not needed for the help
    from dflash.train.doctor import examine

    config = read_config(arguments)
    paths = newest_prepared_run(config) if arguments.run_dir is None else RunPaths(arguments.run_dir)
    report = examine(config, parts=("start", "data"), paths=paths, overfit_limit_s=OVERFIT_LIMIT_S)
    emit(arguments, report.payload, report.text)
    return EXIT_USER_ERROR if report.failures else EXIT_OK
