"""A Prefect server for the length of one program, so that nothing has to be set up by hand.

Invariant: it listens on 127.0.0.1 only, keeps its history where any later server finds it (`PREFECT_HOME`), and dies with the
program, however that dies.
Hard decision: Prefect would start one by itself, but in the program's own process group, where Ctrl-C ends the server
before the flow can record how it ended. This one has a session of its own, and its UI can be looked at meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError

from dflash.errors import DflashError
from dflash.train.processes import die_with_parent, end_child

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 15.0
PROBE_TIMEOUT_S = 2.0


def answers(api_url: str) -> bool:
    """Whether a Prefect server answers at `api_url`."""
    return health_status(api_url, timeout_s=PROBE_TIMEOUT_S) == HTTPStatus.OK


def health_status(api_url: str, *, timeout_s: float) -> int | None:
    """HTTP status with which something at `api_url` answers whether it is healthy; None if nothing answers."""
    try:
        with urllib.request.urlopen(f"{api_url}/health", timeout=timeout_s) as response:  # noqa: S310 - from Prefect's settings
            return int(response.status)
    except HTTPError as error:
        return error.code
    except (URLError, HTTPException, OSError, ValueError):
        return None


@contextlib.contextmanager
def temporary_server() -> Iterator[str]:
    """Start a server, yield its API's address, stop it.

    Raises:
        DflashError: it did not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    api_url = f"http://127.0.0.1:{port}/api"
    with tempfile.TemporaryDirectory(prefix="dflash-prefect-") as folder:
        log = Path(folder) / "server.log"
        server = _start(port, api_url, log)
        try:
            _await_health(server, api_url, log)
            yield api_url
        finally:
            end_child(server, grace_s=STOP_TIMEOUT_S)


def _start(port: int, api_url: str, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    # The addresses would otherwise be those of prefect.toml, and the UI would ask another server.
    environment = {**os.environ, "PREFECT_API_URL": api_url, "PREFECT_UI_API_URL": api_url, "DO_NOT_TRACK": "1"}
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - a program that has just begun has no threads
        )


def _await_health(server: subprocess.Popen[bytes], api_url: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not answers(api_url):
        if server.poll() is not None or time.monotonic() > deadline_s:
            tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise DflashError(f"Prefect's temporary server did not start:\n{tail}", remedy="start one with infra/local/up")
        time.sleep(0.2)
