"""Servers and workers of one process alone, started by `infra/local/up` on free ports and in a folder of their own.

Invariant: nothing of a person's own servers is touched, and nothing that is started outlives the process that wanted it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
_FOREIGN = ("PREFECT_", "MLFLOW_", "DFLASH_")  # prefixes of variables that would lead to somebody else's servers


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
