"""Server, MLflow, workers and deployments of a drill: `infra/local/up` on ports and in a folder of its own.

Invariant: everything listens on 127.0.0.1, nothing of a person's own servers is touched, and `infra/local/down` ends exactly
what was started here, however the drill ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from dflash.errors import DflashError

CHECKOUT = Path(__file__).parents[1]
TIMEOUT_S = 240.0
_FOREIGN = ("PREFECT_", "MLFLOW_", "DFLASH_")  # prefixes of variables that would lead to somebody else's servers


@dataclass(frozen=True, slots=True)
class DrillStack:
    """Running servers and workers."""

    root: Path
    environment: dict[str, str]

    @property
    def api_url(self) -> str:
        """Address of the Prefect server's API."""
        return self.environment["PREFECT_API_URL"]

    def call(self, *command: str) -> str:
        """Run a command against these servers and return what it printed.

        Raises:
            DflashError: it failed.
        """
        done = subprocess.run(
            command, cwd=CHECKOUT, env=self.environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            said = f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}".strip()[-2000:]
            raise DflashError(said, remedy=f"look into {self.root / 'local' / 'logs'}")
        return done.stdout

    def prefect(self, *arguments: str) -> str:
        """Prefect's command line; see `call`."""
        return self.call(str(Path(sys.executable).parent / "prefect"), *arguments)

    def kill_worker(self) -> None:
        """SIGKILL to the training worker and to the flow runs that it started; then a worker is started again."""
        pid = int((self.root / "local" / "worker-train.pid").read_text(encoding="utf-8").split()[0])
        victims = [*psutil.Process(pid).children(), psutil.Process(pid)]
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGKILL)
        psutil.wait_procs(victims, timeout=TIMEOUT_S)
        self.call("infra/local/up")


@contextlib.contextmanager
def drill_stack(root: Path) -> Iterator[DrillStack]:
    """Start everything, deploy, and stop it when the block ends."""
    stack = DrillStack(root.resolve(), servers_environment(root.resolve(), runs=root.resolve()))
    with servers_end_with_us(stack.environment):
        stack.call("infra/local/up")
        stack.prefect("--no-prompt", "deploy", "--all")
        yield stack


@contextlib.contextmanager
def servers_end_with_us(environment: dict[str, str]) -> Iterator[None]:
    """Stop what `infra/local/up` starts in the block when the block ends, and also if this process is killed in it.

    Servers outlive whoever starts them, and their schedules would go on with health checks for nobody. So a shell waits for the
    end of a pipe that only this process holds.
    """
    waits = ["sh", "-c", "read -r _; exec infra/local/down"]
    silent = subprocess.DEVNULL
    guard = subprocess.Popen(
        waits, cwd=CHECKOUT, env=environment, stdin=subprocess.PIPE, stdout=silent, stderr=silent, start_new_session=True
    )
    try:
        yield
    finally:
        guard.communicate()


def servers_environment(root: Path, *, runs: Path) -> dict[str, str]:
    """Environment in which `infra/local/up`, Prefect and MLflow keep to `root`, on free ports, with runs in `runs`."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        prefect_port, mlflow_port = one.getsockname()[1], other.getsockname()[1]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
    return kept | {
        "PREFECT_HOME": str(root / "prefect"),
        "PREFECT_API_URL": f"http://127.0.0.1:{prefect_port}/api",
        "PREFECT_WORKER_QUERY_SECONDS": "1",  # the defaults (10 s and 60 s) suit production
        "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2",
        "DFLASH_BIN": str(Path(sys.executable).parent),
        "DFLASH_LOCAL_DIR": str(root / "local"),
        "DFLASH_RUNS_DIR": str(runs),
        "DFLASH_PREFECT_PORT": str(prefect_port),
        "DFLASH_MLFLOW_PORT": str(mlflow_port),
        "PYTHONPATH": str(CHECKOUT),  # the code of this checkout, wherever the package is installed from
        "OMP_NUM_THREADS": "1",
    }
