"""The evaluation flow with a server: what reaches the library, and what is refused before anything is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect.exceptions import ParameterTypeError

from dflash.errors import ConfigError
from dflash.records import EvaluationResult
from flows.evaluate import evaluate
from tasks import evaluate_server as task_module
from tests.flows.fake_stages import evaluation

pytestmark = pytest.mark.usefixtures("prefect_server")
CONFIG = "target: {path: demo, mask_token: '<|mask|>'}\ndata: {num_conversations: 4}\n"


@pytest.fixture
def run_dir(tmp_path: Path) -> str:
    (tmp_path / "config.yaml").write_text(CONFIG, encoding="utf-8")
    return str(tmp_path)


def test_the_server_of_the_parameters_is_evaluated_and_nothing_else(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def stage(run: Any, *, progress: Any, **where: Any) -> EvaluationResult:
        asked.append({"root": str(run.paths.root), **where})
        progress("decoding", 1, 1)
        return evaluation("vllm")

    monkeypatch.setattr(task_module, "evaluate_served_stage", stage)
    [result] = evaluate(run_dir, engine="vllm", url="http://a:1", plain_url="http://b:2")
    assert result.drafter == "vllm"
    assert asked == [{"root": run_dir, "engine": "vllm", "url": "http://a:1", "plain_url": "http://b:2"}]


def test_parameters_that_fit_nothing_are_refused(run_dir: str) -> None:
    with pytest.raises(ConfigError, match="there is no server"):
        evaluate(run_dir, engine="sglang")
    with pytest.raises(ConfigError, match="engine is in_process"):
        evaluate(run_dir, url="http://a:1")
    wrongs = ({"engine": "tgi", "url": "http://a:1"}, {"engine": "vllm", "url": "a:1"}, {"engine": "vllm", "url": "http://a b"},
              {"engine": "vllm", "url": "http://me:pw@a:1"})  # fmt: skip
    for wrong in wrongs:
        with pytest.raises(ParameterTypeError):
            evaluate(run_dir, **wrong)  # type: ignore[arg-type]
