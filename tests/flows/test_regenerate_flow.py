"""The flow that has a corpus answered: parameters, retries after passing faults, artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.exceptions import ParameterTypeError

from dflash.config import Config
from dflash.errors import DflashError, ServerError, TargetError
from dflash.stages import RegenerateStage
from flows.regenerate import regenerate

pytestmark = pytest.mark.usefixtures("prefect_server")


class FakeStage:
    """Raises what it is given, then returns a plausible result."""

    def __init__(self, *errors: DflashError) -> None:
        self.errors = list(errors)
        self.calls: list[tuple[Config, str | None]] = []

    def __call__(self, config: Config, *, output: str | None, progress: Any) -> RegenerateStage:
        self.calls.append((config, output))
        progress("answers", 1, 2)
        if self.errors:
            raise self.errors.pop(0)
        progress("answers", 2, 2)
        return RegenerateStage(output or "default.jsonl", "q", "j", 2, 3, 0, 2, {"unfinished": 1})


def install(monkeypatch: pytest.MonkeyPatch, *errors: DflashError) -> FakeStage:
    stage = FakeStage(*errors)
    monkeypatch.setattr("tasks.regenerate_answers.regenerate_stage", stage)
    monkeypatch.setattr("tasks.regenerate_answers.regenerate_answers.retry_delay_seconds", 0)
    return stage


def test_it_passes_its_parameters_on_and_leaves_artifacts(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = install(monkeypatch)
    state = regenerate(str(config_file), ["data.answers.max_new_tokens=9"], "s3://b/out.jsonl.gz", return_state=True)
    assert state.is_completed()
    assert state.result() == "s3://b/out.jsonl.gz"
    [(config, output)] = stage.calls
    assert (config.data.answers.max_new_tokens, output) == (9, "s3://b/out.jsonl.gz")
    with get_client(sync_client=True) as client:
        run_id = state.state_details.flow_run_id
        found = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run_id])))
    assert {"answers", "answers-progress"} <= {item.key for item in found}


def test_a_server_that_is_away_is_asked_again_later_but_a_wrong_one_is_not(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = install(monkeypatch, ServerError("away", remedy="wait"))
    assert regenerate(str(config_file), return_state=True).is_completed()
    assert len(stage.calls) == 2
    stage = install(monkeypatch, TargetError("another model", remedy="serve the target"))
    state = regenerate(str(config_file), return_state=True)
    assert state.is_failed()
    assert "another model" in (state.message or "")
    assert len(stage.calls) == 1


def test_an_output_that_no_reader_would_take_is_refused_before_anything_runs(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = install(monkeypatch)
    with pytest.raises(ParameterTypeError, match="output"):
        regenerate(str(config_file), output="answers.csv")
    assert not stage.calls
