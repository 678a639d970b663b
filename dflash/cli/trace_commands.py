"""`python -m dflash trace RUN --output FILE`: a run's log as a timeline for Perfetto or chrome://tracing."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dflash.cli.arguments import add_command, add_run_dir
from dflash.cli.output import emit
from dflash.errors import ConfigError, RunStateError
from dflash.records import RunPaths
from dflash.storage import atomic_write_text


def register(groups: Any) -> None:
    """Add the `trace` command."""
    parser = add_command(
        groups,
        "trace",
        "turn a run's log into a timeline that ui.perfetto.dev and chrome://tracing open (Chrome trace JSON)",
        _trace,
    )
    add_run_dir(parser)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="where to write it, e.g. trace.json")
    parser.add_argument("--steps", metavar="FIRST:END", default="0:", help="only these steps, e.g. 1000:2000; all if absent")


def _trace(arguments: argparse.Namespace) -> int:
    first, end = _range_of(arguments.steps)
    written = write_trace(RunPaths(arguments.run_dir), arguments.output, first_step=first, end_step=end)
    emit(
        arguments,
        written,
        f"wrote {written['path']}: {written['steps']} steps, {written['events']} events over {written['seconds']:.0f} s; "
        "open it in https://ui.perfetto.dev",
    )
    return 0


def write_trace(paths: RunPaths, output: Path, *, first_step: int, end_step: int | None) -> dict[str, Any]:
    """Write the timeline of a run's steps in [first_step, end_step) to a file.

    Returns:
        What was written: path, steps, events, seconds.

    Raises:
        RunStateError: the run has no log yet, none of these steps, or more of them than a viewer opens.
    """
    from dflash.train.chrome import chrome_trace
    from dflash.train.timeline import read_timeline

    timeline = read_timeline(paths.log, first_step=first_step, end_step=end_step)
    if not timeline.steps and first_step:
        raise RunStateError(
            f"{paths.log} has no step from {first_step} on", remedy="give steps that the run has had, or leave --steps out"
        )  # fmt: skip
    trace = chrome_trace(timeline, run=paths.root.resolve().name)
    atomic_write_text(output, json.dumps(trace, separators=(",", ":"), allow_nan=False) + "\n")
    seconds = max((span.end_s for span in timeline.spans), default=0.0)
    return {"path": str(output), "steps": timeline.steps, "events": len(trace["traceEvents"]), "seconds": seconds}


def _range_of(text: str) -> tuple[int, int | None]:
    first, colon, end = text.partition(":")
    try:
        span = int(first or 0), int(end) if end else None
    except ValueError:
        span = -1, None
    if not colon or span[0] < 0 or (span[1] is not None and span[1] <= span[0]):
        raise ConfigError(f"--steps {text!r} is no range of steps", remedy="write it as FIRST:END, e.g. --steps 1000:2000")
    return span
