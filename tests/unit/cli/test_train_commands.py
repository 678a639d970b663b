"""`train --accept-changes` changes the newest unfinished run before anything else happens; `--trace` writes its timeline last."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash.cli import main, train_commands
from dflash.config import dump_config, load_config, parse_config
from dflash.errors import RunStateError
from dflash.records import RunPaths
from dflash.stages.run import Run
from dflash.stages.train import TrainStage
from dflash.train.changes import read_changes
from dflash.train.runs import prepare_run
from tests.support.timed_log import rolled_back, written

TEXT = "run: {{name: wide, root: {root}}}\ntarget: {{path: {root}/none, mask_token_id: 3}}\ndata: {{num_conversations: 5}}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "wide.yaml"
    path.write_text(TEXT.format(root=tmp_path))
    return path


def test_there_must_be_a_run_to_change(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(file), "cluster.replicas=2", "--accept-changes"]) == RunStateError.exit_code
    assert "there is no run wide" in capsys.readouterr().err


def test_the_newest_run_is_changed_and_then_continued(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = parse_config(file.read_text(), origin="test", overrides=())
    runs = [RunPaths(tmp_path / f"wide-00{number}") for number in (1, 2)]
    for paths in runs:
        prepare_run(known, paths, location=tmp_path, fingerprint="f")
    # The target does not exist, so the training itself cannot begin: only the change happens.
    assert main(["train", str(file), "cluster.replicas=2", "--accept-changes"]) != 0
    assert "none does not exist" in capsys.readouterr().err
    assert runs[0].config.read_text() == dump_config(known)
    assert load_config(runs[1].config).cluster.replicas == 2
    assert [change.differences for change in read_changes(runs[1])] == [("cluster.replicas: 1 -> 2",)]


def test_the_timeline_of_the_training_is_written_at_its_end(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(RunPaths(tmp_path / "wide-001"), load_config(file), resumed=False)

    def trains(run: Run, **_: object) -> TrainStage:
        written(run.paths.root, rolled_back())
        return TrainStage(8, 1.0, 0.0, "checkpoints/step-8", 0, 1, "busy")

    plan = SimpleNamespace(manifest=SimpleNamespace(padding_efficiency=1.0))
    fake = SimpleNamespace(
        open_run=lambda _: run, prepare_stage=lambda *_, **__: None, plan_stage=lambda *_: plan, train_stage=trains
    )
    monkeypatch.setattr(train_commands, "stages", fake)
    assert main(["train", str(file), "--trace", str(tmp_path / "trace.json"), "--json"]) == 0
    capsys.readouterr()
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"]["run"] == "wide-001" and trace["otherData"]["steps"] == 14
    assert main(["train", str(file), "--trace", str(tmp_path / "no folder" / "trace.json")]) == 1
    assert "checkpoint checkpoints/step-8" in capsys.readouterr().out, "what was trained is told all the same"
