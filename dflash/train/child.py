"""The trainer as a child process of the supervisor: started detached, ended gently, its output in a file.

Invariant: torchrun gets its own session (a signal to the supervisor's group never reaches it twice) and dies with the
supervisor; nothing of it inherits the supervisor's output, because an orphan that holds a pipe keeps its reader alive.
"""

from __future__ import annotations

import logging
import os
import select
import subprocess
import time
from collections.abc import Callable

from dflash.config import Config
from dflash.records import RunPaths
from dflash.train.launch import launch_command, ranks_store, trainer_environment
from dflash.train.node import announce
from dflash.train.processes import STOP_GRACE_S, end_recorded, identify, register_process

logger = logging.getLogger(__name__)

TICK_S = 0.5


class TrainerProcess:
    """One launch of torchrun."""

    def __init__(self, config: Config, paths: RunPaths, *, segment: int, resume_step: int | None) -> None:
        self._paths = paths
        paths.trainer_exit.unlink(missing_ok=True)
        self._rendezvous = paths.control_dir.resolve() / f"rendezvous-{segment}"
        self._rendezvous.unlink(missing_ok=True)
        command = launch_command(
            paths.root.resolve(),
            self._rendezvous,
            cluster=config.cluster,
            node=0,
            segment=segment,
            resume_step=resume_step,
        )
        if config.cluster.nodes > 1:
            announce(paths, segment=segment, resume_step=resume_step)
        with paths.trainer_output.open("ab") as output:
            output.write(f"--- segment {segment}, from checkpoint {resume_step} ---\n".encode())
            output.flush()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=trainer_environment(config.cluster),
                start_new_session=True,
            )
        self._ended: int | None = os.pidfd_open(self._process.pid)
        identity = identify(self._process.pid, role="torchrun")
        if identity is not None:
            register_process(paths, identity)

    def wait_tick(self) -> bool:
        """Wait for the process for at most one tick; returns whether it has ended."""
        # One wait in the kernel: `Popen.wait` with a limit asks twenty times a second instead.
        if self._ended is not None and not select.select([self._ended], [], [], TICK_S)[0]:
            return False
        self._process.wait()
        self._close()
        return True

    def end(self, *, on_wait: Callable[[], None]) -> None:
        """End it if it still runs: SIGTERM, time to save, SIGKILL; `on_wait` is called about twice a second."""
        deadline_s = time.monotonic() + STOP_GRACE_S
        self._process.terminate()
        while not self.wait_tick():
            on_wait()
            if time.monotonic() > deadline_s:
                logger.warning("the trainer did not end within %.0f s of SIGTERM: killing it", STOP_GRACE_S)
                self._process.kill()
                self._process.wait()
                self._close()
                break
        self.end_orphans(grace_s=max(0.0, deadline_s - time.monotonic()))

    def _close(self) -> None:
        if self._ended is not None:
            os.close(self._ended)
            self._ended = None

    def end_orphans(self, *, grace_s: float) -> None:
        """End ranks that outlived torchrun, and clear the rendezvous."""
        end_recorded(self._paths, grace_s=grace_s)
        self._rendezvous.unlink(missing_ok=True)
        ranks_store(self._rendezvous).unlink(missing_ok=True)

    @property
    def returncode(self) -> int | None:
        """Exit status of torchrun."""
        return self._process.returncode
