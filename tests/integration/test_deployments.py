"""Real servers and workers on 127.0.0.1: deploy, run the demo by its bare name, see the scheduled health check run.

One test, because starting the servers and training once cost a minute; it goes the way that a person would go.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import httpx
import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.schedules import IntervalSchedule

from dflash.records import RunPaths, RunSummary, from_json
from dflash.train.attempts import attempts
from dflash.train.processes import recorded_processes
from tests.support.stack import BIN, Stack, alive, artifacts_of, awaited, client_of, continued_by, ended, kill_flow, running_stack

CHECK_EVERY_S = 10

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack")) as made:
        yield made


@pytest.fixture
def client(stack: Stack) -> Iterator[SyncPrefectClient]:
    with client_of(stack) as made:
        yield made


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

    run_id = stack.submit()

    def check_of_the_live_run() -> FlowRun | None:
        training = ended(client, run_id)
        assert training is None or training.state.is_completed(), training.state.message  # type: ignore[union-attr]
        return scheduled_check_of(client, checks["demo"].id, "tiny-001")

    check = awaited(check_of_the_live_run, within_s=240, what="a scheduled check of the live run")
    assert check.state is not None
    assert check.state.is_completed(), check.state.message

    # The flow's process dies without a word: the schedule alone brings the run back.
    paths = RunPaths(stack.runs / "tiny-001")
    kill_flow(paths, run_id)
    dead = awaited(lambda: ended(client, run_id), within_s=60, what="the end of the dead flow run")
    assert dead.state is not None
    assert dead.state.is_crashed()
    successor = awaited(lambda: continued_by(paths, run_id), within_s=120, what="the new flow run")
    run = awaited(lambda: ended(client, successor), within_s=240, what="the end of the training flow")
    assert run.state is not None
    assert run.state.is_completed(), run.state.message
    assert len(attempts(paths)) == 2
    assert {"run", "data", "plan", "training", "training-progress", "evaluation", "health", "summary"} <= set(
        artifacts_of(client, run)
    )
    summary = from_json(RunSummary, paths.summary.read_bytes(), origin="summary.json")
    assert summary.steps == 300
    assert summary.lossless
    assert recorded_processes(paths) == []
    (tracked,) = mlflow_runs(stack)
    assert tracked["info"]["run_id"] == summary.mlflow_run_id
    assert tracked["info"]["status"] == "FINISHED"


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
