"""Processes of a run: who they are, that they die with their parent, and how to end what a dead supervisor left.

Invariant: a pid alone never identifies a process; pid, start time in kernel ticks and boot id together do, so nothing
that merely inherited a number is ever signalled.
Hard decision: torchrun gives every rank its own session, so killing a process group never reaches the ranks. Each
process asks the kernel for a signal when its parent dies and records itself, and the next supervisor ends the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import logging
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash.records import RunPaths
from dflash.storage import atomic_write_text

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
"""From <sys/prctl.h>."""

STOP_GRACE_S = 25.0
"""Time to finish a step and save after SIGTERM: below the 30 s that Prefect and torchrun give before they kill."""

KILLED_WITHIN_S = 10.0
"""Longest wait for the end of a process after SIGKILL: until then it may still hold a device's memory."""

ORPHANED_EXIT = 3
"""Exit status of a process whose parent was gone before it could ask to die with it."""

LAUNCHER_PID_VARIABLE = "DFLASH_LAUNCHER_PID"
"""Environment variable in which torchrun's pid travels to the ranks."""

STORE_VARIABLE = "DFLASH_GROUP_STORE"
"""Environment variable with the file where the ranks of one machine meet; absent across machines (torchrun's store is used)."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of this boot of this machine.

    Attributes:
        start_ticks: start time since boot in clock ticks, as the kernel counts them.

    """

    role: str
    pid: int
    start_ticks: int
    boot_id: str


def identify(pid: int, *, role: str) -> ProcessIdentity | None:
    """Identity of a running process, None if there is none (a zombie is none)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name in parentheses may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return None
    return ProcessIdentity(role=role, pid=pid, start_ticks=int(fields[19]), boot_id=boot_id())


def boot_id() -> str:
    """What tells this boot of this machine from any other; the monotonic clocks of one boot can be compared."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def this_process(*, role: str) -> ProcessIdentity:
    """Identity of the calling process."""
    found = identify(os.getpid(), role=role)
    if found is None:
        raise RuntimeError("a process that runs is always found in /proc")
    return found


def die_with_parent(expected_parent_pid: int) -> bool:
    """Ask the kernel for SIGTERM when the parent dies.

    Returns:
        False if the parent is gone already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    return os.getppid() == expected_parent_pid


def register_process(paths: RunPaths, identity: ProcessIdentity) -> None:
    """Add a process to the run's `pids.json`; any number of processes may do so at once."""
    with _registry_lock(paths):
        known = [known for known in _read(paths.trainer_pids) if known.pid != identity.pid]
        _write(paths.trainer_pids, [*known, identity])


def recorded_processes(paths: RunPaths) -> list[ProcessIdentity]:
    """Recorded processes that still run."""
    return [process for process in _read(paths.trainer_pids) if identify(process.pid, role=process.role) == process]


def end_recorded(paths: RunPaths, *, grace_s: float) -> int:
    """End every recorded process that still runs: SIGTERM, `grace_s` to save, then SIGKILL.

    Returns:
        How many there were.
    """
    running = recorded_processes(paths)
    for process in running:
        logger.warning("ending %s (pid %d), left over from an earlier start", process.role, process.pid)
        _send(process, signal.SIGTERM)
    until_s = time.monotonic() + grace_s  # for all of them together
    for process in running:
        if not _wait_gone(process, timeout_s=max(0.0, until_s - time.monotonic())):
            logger.warning("%s (pid %d) did not end within %.0f s: killing it", process.role, process.pid, grace_s)
            _send(process, signal.SIGKILL)
            _wait_gone(process, timeout_s=KILLED_WITHIN_S)
    with _registry_lock(paths):
        _write(paths.trainer_pids, recorded_processes(paths))
    return len(running)


def end_child(child: subprocess.Popen[bytes] | subprocess.Popen[str], *, grace_s: float) -> None:
    """End a child process if it still runs: SIGTERM, `grace_s` to end by itself, then SIGKILL; it is gone afterwards."""
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(timeout=grace_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _send(process: ProcessIdentity, number: signal.Signals) -> None:
    with _pidfd(process) as descriptor:
        if descriptor is not None:
            signal.pidfd_send_signal(descriptor, number)


def _wait_gone(process: ProcessIdentity, *, timeout_s: float) -> bool:
    with _pidfd(process) as descriptor:
        if descriptor is None:
            return True
        readable, _, _ = select.select([descriptor], [], [], timeout_s)
        return bool(readable)


@contextlib.contextmanager
def _pidfd(process: ProcessIdentity) -> Iterator[int | None]:
    """A descriptor of exactly this process, None if it is gone."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        yield None
        return
    try:
        # Checked after opening: the descriptor can no longer come to mean another process.
        yield descriptor if identify(process.pid, role=process.role) == process else None
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _registry_lock(paths: RunPaths) -> Iterator[None]:
    paths.control_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(paths.control_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(path: Path) -> list[ProcessIdentity]:
    if not path.is_file():
        return []
    return [ProcessIdentity(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def _write(path: Path, processes: list[ProcessIdentity]) -> None:
    atomic_write_text(path, json.dumps([asdict(process) for process in processes], indent=2) + "\n")
