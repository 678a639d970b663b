"""Becomes torchrun: asks to die with the supervisor, then replaces itself by `torch.distributed.run`.

Invariant: on one machine nothing listens on a network interface: torchrun's agents and the ranks meet in files, and the ranks
talk through the loopback; `--standalone` would open a TCP store on every interface. Several machines meet at the first one's
`cluster.rendezvous` (torchrun's static rendezvous), which does listen: see docs/scale-out.md.
A separate program because the request to the kernel survives exec but must be made after fork, where a threaded
supervisor can run no Python safely.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from dflash.train.processes import LAUNCHER_PID_VARIABLE, ORPHANED_EXIT, STORE_VARIABLE, die_with_parent

if TYPE_CHECKING:
    from dflash.config import ClusterConfig

_USAGE_EXIT = 2


def launch_command(
    run_dir: Path, rendezvous: Path, *, cluster: ClusterConfig, node: int, segment: int, resume_step: int | None
) -> list[str]:
    """Command line that starts this machine's ranks of a run's trainer as a child of this very process.

    Args:
        run_dir: the run's folder.
        rendezvous: file that does not exist yet, where torchrun's agents meet; unused with several nodes.
        cluster: replicas, nodes, rendezvous.
        node: number of this machine, 0 for the supervisor's.
        segment: number of this stretch of the log.
        resume_step: checkpoint to continue from; None starts at step 0.
    """
    worker = ["--run-dir", str(run_dir), "--segment", str(segment)]
    if resume_step is not None:
        worker += ["--resume-step", str(resume_step)]
    if cluster.nodes == 1:
        store = str(ranks_store(rendezvous))
        meeting = ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={rendezvous}", "--local-addr=127.0.0.1"]
    else:
        store = "-"
        timeout_s = int(cluster.collective_timeout_s)
        meeting = ["--rdzv-backend=static", f"--rdzv-endpoint={cluster.rendezvous}", f"--rdzv-conf=timeout={timeout_s}"]
    torchrun = [
        f"--nnodes={cluster.nodes}",
        f"--node-rank={node}",
        f"--nproc-per-node={cluster.replicas_per_node}",
        "--max-restarts=0",
        *meeting,
        f"--rdzv-id={rendezvous.name}",
        "--module",
        "dflash.train.worker",
    ]
    return [sys.executable, "-m", "dflash.train.launch", str(os.getpid()), store, *torchrun, *worker]


def trainer_environment(cluster: ClusterConfig) -> dict[str, str]:
    """Environment of torchrun and its ranks."""
    threads = str(cluster.torch_threads)
    environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
    if cluster.device == "cuda":
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return environment


def ranks_store(rendezvous: Path) -> Path:
    """File where the ranks of one machine meet, beside the one of torchrun's agents."""
    return rendezvous.with_name(f"{rendezvous.name}-ranks")


def main(arguments: list[str]) -> int:
    """Exec torchrun with `arguments[2:]`; before come the supervisor's pid and the ranks' store (`-` for none)."""
    if len(arguments) < 2 or not arguments[0].isdigit():
        sys.stderr.write("usage: python -m dflash.train.launch SUPERVISOR_PID RANKS_STORE TORCHRUN_ARGUMENTS...\n")
        return _USAGE_EXIT
    if not die_with_parent(int(arguments[0])):
        return ORPHANED_EXIT
    os.environ.pop(STORE_VARIABLE, None)
    if arguments[1] != "-":
        os.environ[STORE_VARIABLE] = arguments[1]
        Path(arguments[1]).unlink(missing_ok=True)  # of a launch that died: its ranks must not be waited for
    return _become_torchrun(arguments[2:])


def _become_torchrun(arguments: list[str]) -> NoReturn:
    os.environ[LAUNCHER_PID_VARIABLE] = str(os.getpid())
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *arguments])  # noqa: S606


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
