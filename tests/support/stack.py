"""Real servers and workers on 127.0.0.1, as `infra/local/up` starts them, for tests that ask them what happened."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import psutil
import pytest
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings

from dflash.records import RunPaths
from dflash.train.attempts import end_of, read_attempt
from dflash.train.progress import read_progress
from tasks.own_servers import servers_end_with_us, servers_environment

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
ValueT = TypeVar("ValueT")

TINY = (
    "run.name=tiny", "data.num_conversations=64", "data.max_bad_frac=1", "train.max_steps=300", "train.epochs=80",
    "checkpoint.interval_steps=50", "evaluate.num_prompts=4", "evaluate.untrained_prompts=2", "evaluate.max_new_tokens=16",
)  # fmt: skip
"""Settings of a training that takes a quarter of a minute."""


@dataclass(frozen=True)
class Stack:
    """What infra/local/up started."""

    folder: Path
    env: dict[str, str]
    mlflow: str

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def call(self, *command: str) -> str:
        done = subprocess.run(command, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def pids(self) -> dict[str, int]:
        return {file.stem: int(file.read_text(encoding="utf-8").split()[0]) for file in (self.folder / "local").glob("*.pid")}

    def submit(self, *settings: str, name: str = "demo") -> UUID:
        """Run a training by its bare name, small and on the stack's own runs; returns the flow run's id."""
        parameters = {"config": "configs/demo.yaml", "overrides": [f"run.root={self.runs}", *TINY, *settings]}
        said = self.call(str(BIN / "prefect"), "deployment", "run", name, "--params", json.dumps(parameters))
        assert f"train/{name}" in said, "a bare name means the training"
        found = re.search(r"UUID: (\S+)", said)
        assert found is not None, said
        return UUID(found.group(1))


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_stack(folder: Path, **settings: str) -> Iterator[Stack]:
    """Start servers and workers in `folder`, with further environment variables; stop them at the end."""
    env = servers_environment(folder, runs=folder / "runs") | settings
    made = Stack(folder, env, f"http://127.0.0.1:{env['DFLASH_MLFLOW_PORT']}")
    with servers_end_with_us(env):
        made.call("infra/local/up")
        yield made


@contextmanager
def client_of(stack: Stack) -> Iterator[SyncPrefectClient]:
    """A client of the stack's Prefect server."""
    with temporary_settings({PREFECT_API_URL: stack.env["PREFECT_API_URL"]}), get_client(sync_client=True) as made:
        yield made


def awaited(look: Callable[[], ValueT | None], *, within_s: float, what: str, pause_s: float = 0.3) -> ValueT:
    """Ask until there is an answer; the pause only spares the server."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        found = look()
        if found is not None:
            return found
        time.sleep(pause_s)
    pytest.fail(f"{what} did not happen within {within_s:.0f} s")


def ended(client: SyncPrefectClient, run_id: UUID) -> FlowRun | None:
    run = client.read_flow_run(run_id)
    return run if run.state is not None and run.state.is_final() else None


def artifacts_of(client: SyncPrefectClient, run: FlowRun) -> dict[str, Any]:
    found = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id])))
    return {item.key: item for item in found if item.key}


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def flow_process(paths: RunPaths, flow_run: UUID) -> psutil.Process:
    """The process of a flow run that works on a run."""
    attempt = read_attempt(paths, str(flow_run))
    assert attempt is not None
    assert attempt.process is not None
    return psutil.Process(attempt.process.pid)


def kill_flow(paths: RunPaths, flow_run: UUID) -> None:
    """SIGKILL for the process of a flow run."""
    process = flow_process(paths, flow_run)
    process.kill()
    psutil.wait_procs([process], timeout=30)


def continued_by(paths: RunPaths, flow_run: UUID) -> UUID | None:
    """The flow run that was started in the place of a dead one."""
    end = end_of(paths, str(flow_run))
    return None if end is None or end.continued_by is None else UUID(end.continued_by)


def records_of(paths: RunPaths) -> int:
    """Steps of the newest segment so far."""
    return read_progress(paths).step
