"""A flow run's console, and what its loss means: nothing for the work that is being done.

A worker reads what its flow runs print. When it is killed, the next line that a flow run logs finds a broken pipe, and rich, which
Prefect prints with, ends the process for it (`Console.on_broken_pipe`): a training would be lost to its worker's death. Here the
console falls silent instead; the log at the server and the run's own files go on.
"""

from __future__ import annotations

import os

from rich.console import Console


def outlive_lost_console() -> None:
    """Let this process go on when nobody reads its console any more."""
    Console.on_broken_pipe = _fall_silent  # type: ignore[method-assign]


def _fall_silent(console: Console) -> None:
    console.quiet = True
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, console.file.fileno())  # or what is still buffered would fail once more at the process's end
    os.close(nowhere)
