"""The whole chain with PostgreSQL as Prefect's database, through `prefect deployment run train-v2`; and what the server refuses."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from datetime import timedelta

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import PrefectHTTPStatusError

from dflash.records import RunPaths, RunSummary, from_json
from dflash.train.attempts import end_of
from dflash.train.processes import recorded_processes
from tasks.code_version import code_version
from tests.support.postgres import postgres_bin, running_postgres
from tests.support.stack import BIN, ROOT, Stack, artifacts_of, awaited, client_of, ended, running_stack

pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.skipif(postgres_bin() is None, reason="PostgreSQL is not installed"),
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with (
        running_postgres(tmp_path_factory.mktemp("postgres")) as database,
        running_stack(tmp_path_factory.mktemp("stack"), PREFECT_SERVER_DATABASE_CONNECTION_URL=database) as made,
    ):
        made.call(str(BIN / "prefect"), "--no-prompt", "deploy", "--all")
        yield made


@pytest.fixture
def client(stack: Stack) -> Iterator[SyncPrefectClient]:
    with client_of(stack) as made:
        yield made


def test_deployments_are_as_the_file_says(client: SyncPrefectClient) -> None:
    for name in ("demo", "train-v2"):
        check = client.read_deployment_by_name(f"health-check/{name}")
        assert [(item.active, item.schedule.interval) for item in check.schedules] == [(True, timedelta(minutes=5))]
        assert check.paused is False
        assert check.parameter_openapi_schema["properties"]["act"]["default"] is True
        training = client.read_deployment_by_name(f"train/{name}")
        for deployment in (check, training):
            assert deployment.description
            assert "dflash" in deployment.tags
            assert deployment.version == code_version()
            assert set(deployment.parameters) == {"config"}


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"config": "demo.txt"}, "config"),
        ({"config": "a.yaml", "overrides": ["lr 3"]}, "overrides"),
        ({"config": "a.yaml", "run_name": "../x"}, "run_name"),
    ],
)
def test_parameters_are_refused_at_submission_with_the_field_named(
    client: SyncPrefectClient, parameters: dict[str, object], field: str
) -> None:
    training = client.read_deployment_by_name("train/train-v2")
    with pytest.raises(PrefectHTTPStatusError) as refused:
        client.create_flow_run_from_deployment(training.id, parameters=parameters)
    assert refused.value.response.status_code in (409, 422)
    assert field in refused.value.response.text


def test_a_parameter_that_there_is_not_is_refused_by_its_name(stack: Stack) -> None:
    """By the command line: the server's own interface takes it, and the flow run fails before anything runs."""
    command = [str(BIN / "prefect"), "deployment", "run", "train-v2", "--param", "learning_rate=3"]
    done = subprocess.run(command, cwd=ROOT, env=stack.env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "'learning_rate'" in done.stdout + done.stderr


def test_the_whole_chain_by_the_bare_name_and_the_automation(stack: Stack, client: SyncPrefectClient) -> None:
    done = subprocess.run(
        [str(BIN / "python"), "-m", "flows.automations"], cwd=ROOT, env=stack.env, capture_output=True, text=True, check=False
    )
    assert "created: dflash" in done.stdout, done.stdout + done.stderr
    run_id = stack.submit("run.name=chain", name="train-v2")
    run = awaited(lambda: ended(client, run_id), within_s=400, what="the end of the training flow")
    assert run.state is not None
    assert run.state.is_completed(), run.state.message
    paths = RunPaths(stack.runs / "chain-001")
    summary = from_json(RunSummary, paths.summary.read_bytes(), origin="summary.json")
    assert summary.steps == 300
    assert {"run", "data", "plan", "training", "training-progress", "evaluation", "health", "summary"} <= set(
        artifacts_of(client, run)
    )
    end = end_of(paths, str(run_id))
    assert end is not None
    assert end.how == "finished"
    assert recorded_processes(paths) == []
