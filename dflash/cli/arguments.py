"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash.config import Config, load_config

Command = Callable[[argparse.Namespace], int]

LEAST_WAIT_S = 0.01


def add_group(groups: Any, name: str, summary: str) -> Any:
    """Add a command group and return its sub-commands."""
    group = groups.add_parser(name, help=summary, description=summary)
    return group.add_subparsers(title="commands", required=True, metavar="COMMAND")


def add_command(commands: Any, name: str, summary: str, run: Command) -> argparse.ArgumentParser:
    """Add a command with the options that every command has."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary)
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    parser.add_argument("--verbose", action="store_true", help="log more")
    parser.set_defaults(run=run)
    return parser


def add_config(parser: argparse.ArgumentParser) -> None:
    """A configuration file with dotted overrides."""
    parser.add_argument("config", type=Path, help="YAML configuration, e.g. configs/demo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="dotted overrides, e.g. train.lr=3e-4")


def add_run_dir(parser: argparse.ArgumentParser) -> None:
    """An existing run's folder."""
    parser.add_argument("run_dir", type=Path, help="a run's folder, e.g. runs/demo-001")


def seconds(text: str) -> float:
    """A waiting time on the command line, at least a hundredth of a second.

    Raises:
        ArgumentTypeError: it is no such number.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not LEAST_WAIT_S <= value <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is no time to wait: give seconds, e.g. 5")
    return value


def read_config(arguments: argparse.Namespace) -> Config:
    """Load the configuration that the arguments name."""
    return load_config(arguments.config, overrides=arguments.overrides)
