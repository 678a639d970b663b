"""Processes that tests look for."""

from __future__ import annotations

import psutil


def command_of(process: psutil.Process) -> list[str]:
    """The words of a command line; none of a process that has ended meanwhile, or that its parent has not collected yet."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
