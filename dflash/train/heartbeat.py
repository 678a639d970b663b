"""The supervisor's heartbeat: a small file that says who lives, and how old it is.

Hard decision: written in place, in one write of a fixed length, and never synced. Replacing a file makes the disk wait, which costs
more than all other polling of a supervisor; and a heartbeat is for those who live now, so a crash may lose it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash.records import RunPaths
from dflash.train.processes import boot_id, this_process

LENGTH_BYTES = 256
_MODE = 0o644


class Heart:
    """The calling process's heartbeats as the supervisor of a run, `every_s` seconds apart."""

    def __init__(self, paths: RunPaths, *, every_s: float) -> None:
        self._file = paths.heartbeat
        self._every_s = every_s
        self._me = this_process(role="supervisor")
        self._due_s = 0.0

    def is_due(self) -> bool:
        """Whether it is time for the next one."""
        return time.monotonic() >= self._due_s

    def beat(self) -> None:
        """Write one, whether or not it is time.

        Raises:
            OSError: the disk refuses; the next one is due in its time all the same.
        """
        self._due_s = time.monotonic() + self._every_s
        beat = {
            "pid": self._me.pid,
            "start_time": self._me.start_ticks,
            "boot_id": self._me.boot_id,
            "at": time.time(),
            "mono": time.monotonic(),
        }
        write_heartbeat(self._file, beat)


def write_heartbeat(file: Path, beat: Mapping[str, Any]) -> None:
    """Put `beat` into the file, padded to the length that every heartbeat has."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, _MODE)
    try:
        os.pwrite(descriptor, json.dumps(dict(beat)).ljust(LENGTH_BYTES - 1).encode() + b"\n", 0)
        if os.fstat(descriptor).st_size != LENGTH_BYTES:
            os.ftruncate(descriptor, LENGTH_BYTES)  # another version of the code wrote a longer one
    finally:
        os.close(descriptor)


def heartbeat_age_s(paths: RunPaths) -> float:
    """Seconds since the supervisor's last heartbeat; infinite without one.

    By the monotonic clock within one boot. Across boots or machines the wall clocks' difference counts in both directions: a
    heartbeat from the future says that a clock was set, not that the supervisor is young.
    """
    try:
        beat = json.loads(paths.heartbeat.read_bytes())
        if beat["boot_id"] == boot_id():
            return time.monotonic() - float(beat["mono"])
        return abs(time.time() - float(beat["at"]))
    except (OSError, ValueError, KeyError, TypeError):
        return float("inf")
