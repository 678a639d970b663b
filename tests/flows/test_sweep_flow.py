"""The evaluation flow with a sweep: asked for by a parameter, behind the evaluation, and seen as an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash.records import SweepCell, SweepResult
from flows.evaluate import evaluate
from tasks import sweep_drafter as task_module

pytestmark = pytest.mark.usefixtures("prefect_server", "stages")
CELL = SweepCell(4, 0.0, 8, 3.1, (2.8, 3.4), 900.0, (850.0, 950.0), 2.1, (1.9, 2.3), (1.0, 1.0), lossless=True, differing_prompts=0)


def test_the_sweep_is_asked_for_and_becomes_an_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "target: {path: demo, mask_token: '<|mask|>'}\ndata: {num_conversations: 4}\n"
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    asked: list[tuple[str, Any]] = []
    shown: list[tuple[str, str]] = []

    def stage(run: Any, bench: Any, *, progress: Any) -> SweepResult:
        asked.append((str(run.paths.root), bench))
        progress("sweep", 1, 1)
        return SweepResult("tiny-001", 10, "synthetic", 8, 32, 8, 0.95, "a machine", (CELL,), CELL)

    monkeypatch.setattr(task_module, "open_sweep_bench", lambda _run: "the bench")
    monkeypatch.setattr(task_module, "sweep_stage", stage)
    monkeypatch.setattr(task_module, "markdown", lambda key, content, *, description: shown.append((key, content + description)))
    assert [result.drafter for result in evaluate(str(tmp_path))] == ["untrained", "trained"]
    assert not asked
    assert [result.drafter for result in evaluate(str(tmp_path), sweep=True)] == ["untrained", "trained"]
    assert asked == [(str(tmp_path), "the bench")]
    [(key, content)] = shown
    assert key == "sweep" and "evaluate.block_size=4 evaluate.batch_size=8" in content
