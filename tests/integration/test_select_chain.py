"""Checkpoint selection on real servers: a due checkpoint starts its flow, the probe is the run's, the best one is registered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.objects import FlowRun

from dflash.checkpoint import BEST, outcomes, read_pointer, read_probes
from dflash.records import RunPaths
from tests.support.stack import BIN, Stack, artifacts_of, awaited, client_of, ended, running_stack

pytestmark = [pytest.mark.slow, pytest.mark.full]

PROBED = (
    "probe.every_steps=100", "probe.runner=flow", "probe.num_prompts=8", "probe.max_new_tokens=8", "probe.timeout_s=200",
    "publish.registered_model=tiny-drafter",
)  # fmt: skip


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack")) as made:
        made.call(str(BIN / "prefect"), "--no-prompt", "deploy", "--all")
        assert "created: dflash: select among due checkpoints" in made.call(str(BIN / "python"), "-m", "flows.automations")
        yield made


@pytest.fixture
def client(stack: Stack) -> Iterator[SyncPrefectClient]:
    with client_of(stack) as made:
        yield made


def selections(client: SyncPrefectClient) -> list[FlowRun]:
    deployment = client.read_deployment_by_name("select/due-checkpoints")
    of_deployment = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment.id]))
    return client.read_flow_runs(flow_run_filter=of_deployment)


def registered_model(stack: Stack) -> dict[str, Any]:
    api = f"{stack.mlflow}/api/2.0/mlflow/registered-models/get"
    return dict(httpx.get(api, params={"name": "tiny-drafter"}).json()["registered_model"])


def test_due_checkpoints_are_probed_by_their_own_flow_and_the_best_is_champion(stack: Stack, client: SyncPrefectClient) -> None:
    run_id = stack.submit(*PROBED)
    training = awaited(lambda: ended(client, run_id), within_s=400, what="the end of the training flow")
    assert training.state is not None
    assert training.state.is_completed(), training.state.message
    paths = RunPaths(stack.runs / "tiny-001")

    def all_over() -> list[FlowRun] | None:
        runs = selections(client)
        return runs if runs and all(run.state is not None and run.state.is_final() for run in runs) else None

    runs = awaited(all_over, within_s=200, what="the end of the selections")
    assert all(run.state is not None and run.state.is_completed() for run in runs), [run.state for run in runs]
    assert all(run.parameters == {"run_dir": str(paths.root)} for run in runs)
    assert not (Path(paths.probe_output)).exists(), "the supervisor starts no process of its own"
    found = outcomes(read_probes(paths.probes))
    assert {step for (step, _), record in found.items() if record.figures is not None} == {100, 200, 300}
    best = read_pointer(paths.checkpoints_dir, BEST)
    assert best in (100, 200, 300)
    assert any("champion" in artifacts_of(client, run) for run in runs)
    model = registered_model(stack)
    (alias,) = model["aliases"]
    assert alias["alias"] == "champion"
    version = next(each for each in model["latest_versions"] if each["version"] == alias["version"])
    tags = {tag["key"]: tag["value"] for tag in version["tags"]}
    assert tags["run"] == "tiny-001"
    assert f"/registry/step-{tags['step']}-" in version["source"]
