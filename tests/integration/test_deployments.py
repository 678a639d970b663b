"""Real servers and workers on 127.0.0.1: deploy, run the demo by its bare name, see the scheduled health check run.

One test, because starting the servers and training once cost a minute; it goes the way that a person would go.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import httpx
import psutil
import pytest
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterDeploymentId,
)
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.settings import PREFECT_API_URL, temporary_settings

from dflash.records import RunPaths, RunSummary, from_json

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
CHECK_EVERY_S = 10
ValueT = TypeVar("ValueT")

pytestmark = pytest.mark.slow

TINY = (
    "run.name=tiny", "data.num_conversations=64", "data.max_bad_frac=1", "train.max_steps=300", "train.epochs=80",
    "checkpoint.interval_steps=50", "evaluate.num_prompts=4", "evaluate.untrained_prompts=2", "evaluate.max_new_tokens=16",
)  # fmt: skip


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
        done = subprocess.run(command, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def pids(self) -> dict[str, int]:
        return {file.stem: int(file.read_text(encoding="utf-8").split()[0]) for file in (self.folder / "local").glob("*.pid")}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    prefect_port, mlflow_port = free_port(), free_port()
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_", "DFLASH_"))}
    env |= {
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_API_URL": f"http://127.0.0.1:{prefect_port}/api",
        "PREFECT_WORKER_QUERY_SECONDS": "1",  # the defaults (10 s and 60 s) suit production
        "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2",
        "DFLASH_BIN": str(BIN),
        "DFLASH_LOCAL_DIR": str(folder / "local"),
        "DFLASH_RUNS_DIR": str(folder / "runs"),
        "DFLASH_PREFECT_PORT": str(prefect_port),
        "DFLASH_MLFLOW_PORT": str(mlflow_port),
        "OMP_NUM_THREADS": "1",
    }
    made = Stack(folder, env, f"http://127.0.0.1:{mlflow_port}")
    try:
        made.call("infra/local/up")
        yield made
    finally:
        subprocess.run(["infra/local/down"], cwd=ROOT, env=env, check=False)


@pytest.fixture
def client(stack: Stack) -> Iterator[SyncPrefectClient]:
    with temporary_settings({PREFECT_API_URL: stack.env["PREFECT_API_URL"]}), get_client(sync_client=True) as made:
        yield made


def awaited(look: Callable[[], ValueT | None], *, within_s: float, what: str) -> ValueT:
    """Ask until there is an answer; the pause only spares the server."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        found = look()
        if found is not None:
            return found
        time.sleep(0.3)
    pytest.fail(f"{what} did not happen within {within_s:.0f} s")


def ended(client: SyncPrefectClient, run_id: UUID) -> FlowRun | None:
    run = client.read_flow_run(run_id)
    return run if run.state is not None and run.state.is_final() else None


def artifacts_of(client: SyncPrefectClient, run: FlowRun) -> dict[str, Any]:
    found = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id])))
    return {item.key: item for item in found if item.key}


def scheduled_check_of(client: SyncPrefectClient, deployment_id: Any, run_name: str) -> FlowRun | None:
    """A health check that the schedule started, that has ended, and that has judged the run."""
    of_deployment = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment_id]))
    for run in client.read_flow_runs(flow_run_filter=of_deployment):
        if run.auto_scheduled and run.state is not None and run.state.is_final():
            report = artifacts_of(client, run).get("health")
            if report is not None and run_name in str(report.description):
                return run
    return None


def mlflow_runs(stack: Stack) -> list[dict[str, Any]]:
    api = f"{stack.mlflow}/api/2.0/mlflow"
    experiment = httpx.get(f"{api}/experiments/get-by-name", params={"experiment_name": "demo"}).json()["experiment"]
    found = httpx.post(f"{api}/runs/search", json={"experiment_ids": [experiment["experiment_id"]]}).json()
    return list(found["runs"])


def test_deploy_run_by_name_and_the_scheduled_health_check(stack: Stack, client: SyncPrefectClient) -> None:
    prefect = str(BIN / "prefect")
    stack.call(prefect, "--no-prompt", "deploy", "--all")

    checks = {name: client.read_deployment_by_name(f"health-check/{name}") for name in ("demo", "train-v2")}
    for check in checks.values():
        assert [(item.active, item.schedule.interval) for item in check.schedules] == [(True, timedelta(minutes=5))]
        assert check.paused is False
        assert check.work_pool_name == "dflash-health"
        assert check.global_concurrency_limit is not None
        assert check.global_concurrency_limit.limit == 1
    assert client.read_deployment_by_name("train/train-v2").work_pool_name == "dflash-train"

    # The same check, on the test's own runs and every few seconds, so that nobody waits five minutes.
    places = [f"run.root={stack.runs}", "run.name=tiny"]
    every = IntervalSchedule(interval=timedelta(seconds=CHECK_EVERY_S))
    created = client.request(
        "POST",
        "/deployments/{id}/schedules",
        path_params={"id": checks["demo"].id},
        json=[{"schedule": every.model_dump(mode="json"), "active": True, "parameters": {"overrides": places}, "slug": "soon"}],
    )
    assert created.status_code == 201

    overrides = json.dumps([f"run.root={stack.runs}", *TINY])
    said = stack.call(prefect, "deployment", "run", "demo", "--param", f"overrides={overrides}")
    assert "train/demo" in said, "a bare name means the training"
    found = re.search(r"UUID: (\S+)", said)
    assert found is not None, said
    run_id = UUID(found.group(1))

    def check_of_the_live_run() -> FlowRun | None:
        training = ended(client, run_id)
        assert training is None or training.state.is_completed(), training.state.message  # type: ignore[union-attr]
        return scheduled_check_of(client, checks["demo"].id, "tiny-001")

    check = awaited(check_of_the_live_run, within_s=240, what="a scheduled check of the live run")
    assert check.state is not None
    assert check.state.is_completed(), check.state.message

    run = awaited(lambda: ended(client, run_id), within_s=240, what="the end of the training flow")
    assert run.state is not None
    assert run.state.is_completed(), run.state.message
    assert {"run", "data", "plan", "training", "training-progress", "evaluation", "health", "summary"} <= set(
        artifacts_of(client, run)
    )
    paths = RunPaths(stack.runs / "tiny-001")
    summary = from_json(RunSummary, paths.summary.read_bytes(), origin="summary.json")
    assert summary.steps == 300
    assert summary.lossless
    (tracked,) = mlflow_runs(stack)
    assert tracked["info"]["run_id"] == summary.mlflow_run_id
    assert tracked["info"]["status"] == "FINISHED"


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_what_runs_is_left_alone_and_down_stops_exactly_that(stack: Stack) -> None:
    before = stack.pids()
    assert set(before) == {"prefect-server", "mlflow", "worker-train", "worker-health"}
    said = stack.call("infra/local/up")
    assert said.count("runs already") == len(before)
    assert stack.pids() == before
    for service in before.values():
        listening = [item.laddr.ip for item in psutil.Process(service).net_connections("tcp") if item.status == psutil.CONN_LISTEN]
        assert set(listening) <= {"127.0.0.1"}

    # A pid file that outlived its process, whose number is somebody else's by now: this very process, which would die.
    stale = stack.folder / "local" / "worker-train.pid"
    recorded = stale.read_text(encoding="utf-8")
    stale.write_text(f"{os.getpid()} 1\n", encoding="utf-8")
    stack.call("infra/local/down")
    assert alive(before["worker-train"]), "what is not recorded is not touched"
    stale.write_text(recorded, encoding="utf-8")
    stack.call("infra/local/down")
    assert not [name for name, pid in before.items() if alive(pid)]
    assert stack.pids() == {}
