"""A further machine of a run: starts its share of the ranks whenever the supervisor starts a trainer.

Invariant: it decides nothing. The supervisor, on the first machine, announces every launch in the run's folder (which all machines
share) before it starts its own ranks; this loop follows the newest announcement and ends once the training is finished or the
supervisor's heartbeat has stopped. So a restart after the loss of any rank or machine is one decision in one place.
Clocks of several machines disagree, so liveness is judged by whether the heartbeat's content still changes.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash.config import Config
from dflash.errors import RunStateError, TrainerCrashedError
from dflash.records import RunPaths
from dflash.storage import atomic_write_text
from dflash.train.launch import launch_command, trainer_environment
from dflash.train.processes import STOP_GRACE_S, end_child

logger = logging.getLogger(__name__)

POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of the trainer, as the supervisor announces it.

    Attributes:
        key: unlike any other launch's.
    """

    key: str
    segment: int
    resume_step: int | None


def announce(paths: RunPaths, *, segment: int, resume_step: int | None) -> None:
    """Tell the other machines that a trainer starts now."""
    launch = Launch(key=f"{os.getpid()}-{time.time_ns()}", segment=segment, resume_step=resume_step)
    atomic_write_text(paths.launch, json.dumps(asdict(launch)) + "\n")


def announced(paths: RunPaths) -> Launch | None:
    """The newest launch, None before the first."""
    try:
        return Launch(**json.loads(paths.launch.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def follow_launches(config: Config, paths: RunPaths, *, node: int, patience_s: float) -> None:
    """Start this machine's ranks at every launch, until the training is finished.

    Args:
        config: the run's.
        paths: the run's folder, the same on all machines.
        node: number of this machine, 1 up to `cluster.nodes` - 1.
        patience_s: how long the supervisor may be silent.

    Raises:
        RunStateError: the configuration has no such machine.
        TrainerCrashedError: the supervisor fell silent.
    """
    if not 1 <= node < config.cluster.nodes:
        raise RunStateError(
            f"run {paths.root} has the nodes 0..{config.cluster.nodes - 1}, and 0 is the supervisor's; {node} cannot join",
            remedy="give --node a number from 1 to cluster.nodes - 1",
        )
    before = announced(paths)
    # A launch that was announced before this machine came still waits for it; one that ended left its exit behind.
    seen = None if before is None or not paths.trainer_exit.is_file() else before.key
    pulse = _Pulse(paths, patience_s=patience_s)
    while True:
        launch = announced(paths)
        if launch is None or launch.key == seen:
            pulse.require()
            time.sleep(POLL_S)
            continue
        seen = launch.key
        logger.info("node %d joins segment %d, from checkpoint %s", node, launch.segment, launch.resume_step)
        if _run_ranks(config, paths, launch, node=node, pulse=pulse) == 0:
            return


class _Pulse:
    """Whether the supervisor lives."""

    def __init__(self, paths: RunPaths, *, patience_s: float) -> None:
        self._file = paths.heartbeat
        self._patience_s = patience_s
        self._beat: bytes | None = None
        self._changed_s = time.monotonic()

    def require(self) -> None:
        """Raise if it has been silent for too long."""
        beat = self._file.read_bytes() if self._file.is_file() else None
        if beat != self._beat:
            self._beat, self._changed_s = beat, time.monotonic()
        if time.monotonic() - self._changed_s > self._patience_s:
            raise TrainerCrashedError(
                f"the supervisor has been silent for {self._patience_s:.0f} s ({self._file})",
                remedy="start the training again on the first machine, then join again",
            )


def _run_ranks(config: Config, paths: RunPaths, launch: Launch, *, node: int, pulse: _Pulse) -> int:
    """One torchrun of this machine, from its start to its end; returns its exit status."""
    unused = paths.control_dir.resolve() / f"rendezvous-{launch.segment}"
    command = launch_command(
        paths.root.resolve(), unused, cluster=config.cluster, node=node, segment=launch.segment, resume_step=launch.resume_step
    )
    with _output(paths, node).open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=trainer_environment(config.cluster),
            start_new_session=True,
        )
    try:
        while process.poll() is None:
            newest = announced(paths)
            if newest is not None and newest.key != launch.key:
                logger.warning("the supervisor has started again: ending the ranks of its earlier launch")
                break
            pulse.require()
            time.sleep(POLL_S)
    finally:
        end_child(process, grace_s=STOP_GRACE_S)  # its ranks follow: they asked the kernel to die with it
    return process.returncode


def _output(paths: RunPaths, node: int) -> Path:
    return paths.trainer_output.with_name(f"trainer-node{node}.out")
