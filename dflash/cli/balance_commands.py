"""`python -m dflash balance CONFIG`: tokens a second of every split of the devices, from times measured on a few batches."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from dflash.cli.arguments import add_command, add_config, read_config
from dflash.cli.output import emit
from dflash.errors import EXIT_OK, ConfigError

LENGTHS = 5
REPEATS = 3
LEAST_DEVICES = 2


def register(groups: Any) -> None:
    """Add the `balance` command."""
    parser = add_command(groups, "balance", "which split of the devices is fastest: measured on a few batches", _balance)
    parser.add_argument("--devices", type=int, metavar="N", help="GPUs to split, 2 or more; the configuration's, or 8, if absent")
    add_config(parser)


def _balance(arguments: argparse.Namespace) -> int:
    from dflash.train.balance import splits  # torch is not needed for the help
    from dflash.train.measure import measure

    if arguments.devices is not None and arguments.devices < LEAST_DEVICES:
        raise ConfigError(
            f"--devices {arguments.devices} cannot be split: one drafter and one target need {LEAST_DEVICES}",
            remedy=f"give {LEAST_DEVICES} or more, or leave it out",
        )
    config = read_config(arguments)
    devices = arguments.devices or max(LEAST_DEVICES, config.cluster.devices_needed or 8)
    found = measure(config, lengths=LENGTHS, repeats=REPEATS)
    ways = splits(devices, target_s=found.target_s, drafter_s=found.drafter_s)
    lines = [
        f"one target {found.target_s:.4f} s, one drafter {found.drafter_s:.4f} s for a micro-batch of {found.tokens:.0f} tokens",
        f"calculated for {devices} devices" + (" like this CPU" if config.cluster.device == "cpu" else "") + ":",
        "  replicas x (targets + 1)   devices   tokens/s   set by",
    ]
    for way in ways:
        split = f"{way.replicas} x ({way.targets} + 1)"
        lines.append(f"  {split:<24}   {way.devices:7d}   {way.batches_per_s * found.tokens:8.0f}   {way.bound_by}")
    if config.cluster.device == "cpu":
        alone = found.tokens / max(found.target_s, found.drafter_s)
        shared = found.tokens / (found.target_s + found.drafter_s)
        lines.append(f"here both share the CPU: {shared:.0f} tokens/s on one core, at most {alone:.0f} on two")
    payload = {
        "devices": devices,
        **asdict(found),
        "splits": [asdict(way) | {"tokens_per_s": way.batches_per_s * found.tokens} for way in ways],
    }
    emit(arguments, payload, "\n".join(lines))
    return EXIT_OK
