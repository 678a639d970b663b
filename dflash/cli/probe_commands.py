"""`python -m dflash probe RUN`: acceptance length of a run's durable checkpoints, on a few held-out prompts."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from dflash.cli.arguments import add_command, add_run_dir
from dflash.cli.output import emit
from dflash.errors import EXIT_OK
from dflash.records import to_dict

if TYPE_CHECKING:
    from dflash.records import ProbeRecord


def register(groups: Any) -> None:
    """Add the `probe` command."""
    probe = add_command(
        groups,
        "probe",
        "measure the acceptance length of checkpoints that are due for it (probe.every_steps) and have none",
        _probe,
    )
    add_run_dir(probe)
    probe.add_argument(
        "--parent",
        type=int,
        metavar="PID",
        help="work for this supervisor (its own child) until it dies, newest checkpoints first",
    )


def _probe(arguments: argparse.Namespace) -> int:
    from dflash.stages.probe import give_way, probe_stage  # torch is not needed for the help

    def tell(record: ProbeRecord) -> None:
        if arguments.parent is not None:
            print(_text(record), flush=True)

    if arguments.own_process:
        give_way(arguments.run_dir)
    found = probe_stage(arguments.run_dir, parent_pid=arguments.parent, on_probe=tell)
    if arguments.parent is None:
        text = "\n".join(map(_text, found)) or "every due checkpoint has been probed"
        emit(arguments, [to_dict(record) for record in found], text)
    return EXIT_OK


def _text(record: ProbeRecord) -> str:
    if record.figures is None:
        return f"step-{record.step}: {record.outcome}: {record.reason}"
    figures = record.figures
    ends = "" if figures.acceptance_ci is None else " [{:.3f}, {:.3f}]".format(*figures.acceptance_ci)
    return (
        f"step-{record.step}: acceptance length {figures.acceptance_length:.3f}{ends}, "
        f"{sum(figures.verifications)} verifications in {figures.decode_s:.1f} s"
    )
