"""What a drill does to a run from outside: real signals to its real processes, flipped bytes in its real files."""

from __future__ import annotations

import os
import signal

from dflash.checkpoint import list_checkpoints
from dflash.checkpoint.layout import DRAFTER_FILE
from dflash.errors import RunStateError
from dflash.records import RunPaths
from dflash.train.processes import recorded_processes

FLIPPED_BYTES = 64


def kill_trainer(paths: RunPaths) -> None:
    """Send SIGKILL to the first rank of the trainer."""
    os.kill(_trainer_pid(paths), signal.SIGKILL)


def corrupt_newest_and_kill(paths: RunPaths) -> int:
    """Flip bytes of the newest checkpoint's drafter and kill the trainer, which saves nothing in between; returns the step."""
    pid = _trainer_pid(paths)
    os.kill(pid, signal.SIGSTOP)
    try:
        step = list_checkpoints(paths.checkpoints_dir)[-1]
        with (paths.checkpoint(step) / DRAFTER_FILE).open("r+b") as file:
            file.seek(0, os.SEEK_END)
            middle = file.tell() // 2
            file.seek(middle)
            known = file.read(FLIPPED_BYTES)
            file.seek(middle)
            file.write(bytes(255 - byte for byte in known))
    finally:
        os.kill(pid, signal.SIGKILL)
    return step


def _trainer_pid(paths: RunPaths) -> int:
    pids = [process.pid for process in recorded_processes(paths) if process.role == "trainer"]
    if not pids:
        raise RunStateError(f"no trainer of {paths.root} runs", remedy="look into trainer.out in the run's folder")
    return pids[0]
