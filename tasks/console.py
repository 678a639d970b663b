"""A flow run's console, and what its loss means: nothing for the work that is being done.

A worker reads what its flow runs print. When it is killed, the next line that a flow run logs finds a broken pipe, and rich, which
Prefect prints with, ends the process for it (`Console.on_broken_pipe`): a training would be lost to its worker's death. Here the
console falls silent instead; the log at the server and the run's own files go on. A flow prints with `say` for the same reason.
"""

from __future__ import annotations

import sys

from rich.console import Console

from dflash.evaluate.text import to_nowhere


def outlive_lost_console() -> None:
    """Let this process go on when nobody reads its console any more."""
    Console.on_broken_pipe = _fall_silent  # type: ignore[method-assign]


def say(text: str) -> None:
    """Print a flow's own words, if somebody is there to read them."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        to_nowhere(sys.stdout)


def _fall_silent(console: Console) -> None:
    console.quiet = True
    to_nowhere(console.file)
