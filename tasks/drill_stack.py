"""Server, MLflow, workers and deployments of a drill: `infra/local/up` on ports and in a folder of its own.

Invariant: everything listens on 127.0.0.1, nothing of a person's own servers is touched, and `infra/local/down` ends exactly
what was started here, however the drill ends.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.settings import PREFECT_API_URL, temporary_settings

from dflash.errors import DflashError
from tasks.own_servers import CHECKOUT, servers_end_with_us, servers_environment

TIMEOUT_S = 240.0


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
def client_of(stack: DrillStack) -> Iterator[SyncPrefectClient]:
    """A client of a stack's server."""
    with temporary_settings({PREFECT_API_URL: stack.api_url}), get_client(sync_client=True) as client:
        yield client
