"""`python -m dflash join RUN_DIR --node N`: a further machine of a training that runs on several."""

from __future__ import annotations

import argparse
from typing import Any

from dflash.cli.arguments import add_command, add_run_dir, seconds
from dflash.cli.output import emit
from dflash.config import load_config
from dflash.errors import EXIT_OK
from dflash.records import RunPaths

PATIENCE_S = 120.0


def register(groups: Any) -> None:
    """Add the `join` command."""
    parser = add_command(groups, "join", "train a run's ranks of this machine, as its supervisor on the first one says", _join)
    add_run_dir(parser)
    parser.add_argument("--node", type=int, required=True, help="number of this machine, from 1 to cluster.nodes - 1")
    parser.add_argument(
        "--patience", dest="patience_s", type=seconds, default=PATIENCE_S, help="seconds that the supervisor may be silent"
    )


def _join(arguments: argparse.Namespace) -> int:
    from dflash.train.device_lock import hold_devices
    from dflash.train.doctor import check_devices  # torch is not needed for the help
    from dflash.train.node import follow_launches

    paths = RunPaths(arguments.run_dir)
    config = load_config(paths.config)
    check_devices(config)
    with hold_devices(config.cluster, run=str(paths.root)):
        follow_launches(config, paths, node=arguments.node, patience_s=arguments.patience_s)
    emit(arguments, {"run": str(paths.root), "node": arguments.node}, f"{paths.root}: the training is finished")
    return EXIT_OK
