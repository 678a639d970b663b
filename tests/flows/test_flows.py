"""The flows on a real Prefect server, over stages that only record: order, states, artifacts, logs, retries."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect import State, get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, LogFilter, LogFilterFlowRunId
from prefect.exceptions import ParameterTypeError
from prefect.logging.handlers import APILogHandler

from dflash.errors import DataError, HaltedError, PreflightError, StorageError, UnhealthyError
from dflash.records import RunPaths
from dflash.train.attempts import begin_attempt
from flows.health import health_check
from flows.prepare import prepare
from flows.train import train
from tasks import check_health as health_tasks
from tasks.live_runs import find_live_runs
from tests.flows.fake_stages import FakeStages

pytestmark = pytest.mark.usefixtures("prefect_server")

READY = ["doctor start", "prepare", "plan", "doctor data"]
ORDER = [*READY, "train", "bench", "untrained", "trained", "health", "summarise"]


def artifacts_of(state: State[Any]) -> dict[str, Any]:
    with get_client(sync_client=True) as client:
        run_id = state.state_details.flow_run_id
        found = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run_id])))
    return {item.key: item for item in found if item.key}


def test_train_runs_the_stages_in_order_and_leaves_an_artifact_of_each(
    config_file: Path, stages: FakeStages, capsys: pytest.CaptureFixture[str]
) -> None:
    state = train(str(config_file), ["train.lr=0.5"], return_state=True)
    assert state.is_completed()
    assert stages.calls == ORDER
    assert stages.checked == [("tiny-001", False, True)], "at the end the log is complete and there is nobody to act on"
    artifacts = artifacts_of(state)
    assert {
        "run",
        "doctor-start",
        "doctor-data",
        "data",
        "plan",
        "training",
        "training-progress",
        "evaluation",
        "health",
        "summary",
    } <= set(artifacts)
    assert artifacts["training-progress"].data == 100.0
    assert "non_finite" in artifacts["health"].data
    assert "closing table of tiny-001" in capsys.readouterr().out
    config = RunPaths(config_file.parent / "runs" / "tiny-001").config
    assert "lr: 0.5" in config.read_text(encoding="utf-8")


def test_preparation_leaves_buckets_a_link_to_the_preview_and_a_picture_of_the_plan(config_file: Path, stages: FakeStages) -> None:
    artifacts = artifacts_of(prepare(str(config_file), return_state=True))
    first, second = json.loads(artifacts["data"].data)
    assert first == {
        "bucket": 0, "up to tokens": 16, "samples": 1, "tokens": 12, "supervised tokens": 8, "padding to the edge": "25.0%",
    }  # fmt: skip
    assert second["padding to the edge"] == "71.9%"
    assert "rows set aside: 1" in artifacts["data"].description
    assert artifacts["data-preview"].data == "[/data/x/preview.html](file:///data/x/preview.html)"
    (bucket,) = json.loads(artifacts["plan-buckets"].data)
    assert (bucket["padding"], bucket["share of the batches"]) == ("25.0%", "50.0%")
    assert "(data:image/png;base64,iVBORw==)" in artifacts["plan-picture"].data
    assert "`plan/plan.png`" in artifacts["plan-picture"].data
    assert artifacts["data-progress"].data == 100.0


def test_a_cluster_is_held_for_the_data_set_only(config_file: Path, stages: FakeStages) -> None:
    settings = ["data.runner=dask", "data.workers=3", "data.answers.regenerate=false"]
    assert prepare(str(config_file), settings, return_state=True).is_completed()
    assert stages.calls == ["open dask", "spread over 3 workers", "prepare", "close dask", "plan"]


def test_a_halted_training_fails_the_flow_with_its_own_words_and_is_not_retried(config_file: Path, stages: FakeStages) -> None:
    stages.errors["train"] = [HaltedError("run tiny-001 was halted: the loss diverged at step 7", remedy="read the report")]
    state = train(str(config_file), return_state=True)
    assert state.is_failed()
    assert "HaltedError: run tiny-001 was halted: the loss diverged at step 7" in (state.message or "")
    assert stages.calls == [*READY, "train"]
    with pytest.raises(HaltedError):
        state.result()


@pytest.mark.parametrize(("part", "before"), [("start", READY[:1]), ("data", READY)])
def test_a_failed_examination_ends_the_flow_before_anything_is_spent(
    part: str, before: list[str], config_file: Path, stages: FakeStages
) -> None:
    stages.errors[f"doctor {part}"] = [PreflightError("1 of 14 checks failed: taps: off by one", remedy="set the ids")]
    state = train(str(config_file), return_state=True)
    assert state.is_failed()
    assert "PreflightError: 1 of 14 checks failed: taps: off by one" in (state.message or "")
    assert stages.calls == before


def test_an_unhealthy_run_is_summed_up_first_and_then_fails_the_flow(config_file: Path, stages: FakeStages) -> None:
    stages.verdict = "unhealthy"
    state = train(str(config_file), return_state=True)
    assert stages.calls == ORDER
    assert state.is_failed()
    assert "tiny-001: the loss is unhealthy" in (state.message or "")


def test_preparation_is_tried_again_after_a_passing_fault_only(
    config_file: Path, stages: FakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.prepare_data.prepare_data.retry_delay_seconds", 0)
    stages.errors["prepare"] = [StorageError("the store is away", remedy="wait")]
    assert prepare(str(config_file), return_state=True).is_completed()
    assert stages.calls == ["prepare", "prepare", "plan"]
    stages.errors["prepare"] = [HaltedError("no", remedy="no")]
    assert prepare(str(config_file), return_state=True).is_failed()
    assert stages.calls[3:] == ["prepare"]


def test_the_library_log_reaches_prefect(config_file: Path, stages: FakeStages) -> None:
    state = prepare(str(config_file), return_state=True)
    APILogHandler.flush(APILogHandler())
    with get_client(sync_client=True) as client:
        run_id = state.state_details.flow_run_id
        logs = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run_id])))
    assert any("answers" in entry.message and entry.name == "tasks.progress" for entry in logs)


@pytest.mark.parametrize(
    "parameters",
    [{"config": "demo.txt"}, {"config": "a.yaml", "overrides": ["lr 3"]}, {"config": "a.yaml", "run_name": "../x"}],
    ids=["config", "overrides", "run_name"],
)
def test_parameters_that_cannot_be_meant_are_refused_before_anything_runs(parameters: dict[str, Any], stages: FakeStages) -> None:
    field = list(parameters)[-1]
    with pytest.raises(ParameterTypeError, match=field):
        train(**parameters)
    assert stages.calls == []


def live_run(config_file: Path, name: str) -> RunPaths:
    paths = RunPaths(config_file.parent / "runs" / name)
    paths.control_dir.mkdir(parents=True)
    paths.config.write_bytes(config_file.read_bytes())
    return paths


def test_the_health_check_looks_at_the_live_runs_of_its_configuration_and_acts(config_file: Path, stages: FakeStages) -> None:
    live, _idle, foreign = (live_run(config_file, name) for name in ("tiny-002", "tiny-001", "other-001"))
    with live.lock.open("w") as own, foreign.lock.open("w") as others:
        fcntl.flock(own, fcntl.LOCK_EX)
        fcntl.flock(others, fcntl.LOCK_EX)
        reports = health_check(str(config_file))
    assert [report.run for report in reports] == ["tiny-002"]
    assert stages.checked == [("tiny-002", True, None)]


def test_the_health_check_looks_after_a_run_that_was_given_another_name(config_file: Path, stages: FakeStages) -> None:
    named, elsewhere = live_run(config_file, "trial-001"), live_run(config_file, "trial-002")
    given = {"config": str(config_file), "overrides": ["train.lr=1e-3"], "run_name": "trial"}
    begin_attempt(named, flow_run="a", deployment="d", parameters=given)
    begin_attempt(elsewhere, flow_run="b", deployment="d", parameters=given | {"config": "configs/demo.yaml"})
    with named.lock.open("w") as own, elsewhere.lock.open("w") as others:
        fcntl.flock(own, fcntl.LOCK_EX)
        fcntl.flock(others, fcntl.LOCK_EX)
        assert [report.run for report in health_check(str(config_file))] == ["trial-001"]
        look = find_live_runs.fn
        assert look(str(config_file), overrides=["train.lr=1e-3"], run=None) == [str(named.root)]
        assert look(str(config_file), overrides=["train.lr=2e-3"], run=None) == []


def test_a_run_that_cannot_be_looked_after_keeps_nobody_from_looking_after_the_others(
    config_file: Path, stages: FakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, judged, lost = (live_run(config_file, name) for name in ("tiny-001", "tiny-002", "tiny-003"))
    begin_attempt(lost, flow_run=str(uuid4()), deployment="d", parameters={})
    monkeypatch.setattr("tasks.live_runs.any_unsettled", lambda paths: paths == lost)
    lost.config.write_text("run: {root: 3}\n")
    stages.errors["health"] = [DataError("the ledger is of another version", remedy="use that one")]
    with broken.lock.open("w") as one, judged.lock.open("w") as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        fcntl.flock(other, fcntl.LOCK_EX)
        state = health_check(str(config_file), return_state=True)
        assert "tiny-003: cannot be brought back" in (state.message or "")
        monkeypatch.setattr("tasks.live_runs.any_unsettled", lambda _paths: False)
        stages.errors["health"] = [DataError("the ledger is of another version", remedy="use that one")]
        second = health_check(str(config_file), return_state=True)
    assert [run for run, _, _ in stages.checked] == ["tiny-002", "tiny-002"]
    assert "the ledger is of another version" in (second.message or "")


def test_a_disk_that_fails_under_one_run_keeps_nobody_from_judging_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []

    def check(run_dir: str, *, act: bool, ended: bool | None) -> Any:
        if run_dir == "broken":
            raise OSError(5, "cannot be read")
        judged.append(run_dir)
        return SimpleNamespace(verdict="healthy" if act and ended is None else "unhealthy")

    monkeypatch.setattr(health_tasks, "check_health", check)
    with pytest.raises(OSError, match="cannot be read"):
        health_tasks.check_each(["broken", "whole"], [], act=True)
    assert judged == ["whole"]


def test_the_health_check_fails_loudly_and_is_quiet_where_nothing_runs(config_file: Path, stages: FakeStages) -> None:
    assert health_check(str(config_file)) == []
    live_run(config_file, "tiny-001")
    stages.verdict = "unhealthy"
    state = health_check(str(config_file), run="tiny-001", act=False, return_state=True)
    assert state.is_failed()
    assert "tiny-001: the loss is unhealthy" in (state.message or "")
    assert stages.checked == [("tiny-001", False, None)]
    with pytest.raises(UnhealthyError):
        state.result()
