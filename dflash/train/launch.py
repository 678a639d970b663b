"""Becomes torchrun: asks to die with the supervisor, then replaces itself by `torch.distributed.run`.

Invariant: nothing listens on a network interface. A replica needs no rendezvous beyond its own machine, so the
rendezvous is a file; `--standalone` would open a TCP store on every interface.
A separate program because the request to the kernel survives exec but must be made after fork, where a threaded
supervisor can run no Python safely.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from dflash.train.processes import LAUNCHER_PID_VARIABLE, die_with_parent

_USAGE_EXIT = 2
_ORPHANED_EXIT = 3


def launch_command(run_dir: Path, rendezvous: Path, *, replicas: int, segment: int, resume_step: int | None) -> list[str]:
    """Command line that starts a run's trainer as a child of this very process.

    Args:
        run_dir: the run's folder.
        rendezvous: file that does not exist yet, where torchrun's agents meet.
        replicas: ranks.
        segment: number of this stretch of the log.
        resume_step: checkpoint to continue from; None starts at step 0.
    """
    worker = ["--run-dir", str(run_dir), "--segment", str(segment)]
    if resume_step is not None:
        worker += ["--resume-step", str(resume_step)]
    torchrun = [
        "--nnodes=1",
        f"--nproc-per-node={replicas}",
        "--max-restarts=0",
        "--rdzv-backend=c10d",
        "--rdzv-conf=store_type=file",
        f"--rdzv-endpoint={rendezvous}",
        f"--rdzv-id={rendezvous.name}",
        "--local-addr=127.0.0.1",
        "--module",
        "dflash.train.worker",
    ]
    return [sys.executable, "-m", "dflash.train.launch", str(os.getpid()), *torchrun, *worker]


def main(arguments: list[str]) -> int:
    """Exec torchrun with `arguments[1:]`; `arguments[0]` is the supervisor's pid."""
    if not arguments or not arguments[0].isdigit():
        sys.stderr.write("usage: python -m dflash.train.launch SUPERVISOR_PID TORCHRUN_ARGUMENTS...\n")
        return _USAGE_EXIT
    if not die_with_parent(int(arguments[0])):
        return _ORPHANED_EXIT
    return _become_torchrun(arguments[1:])


def _become_torchrun(arguments: list[str]) -> NoReturn:
    os.environ[LAUNCHER_PID_VARIABLE] = str(os.getpid())
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *arguments])  # noqa: S606


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
