"""The closing summary: gathered from the run's own files, refused while a stage is missing."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dflash.checkpoint import load_checkpoint
from dflash.cli import main
from dflash.data.pointer import read_data_pointer
from dflash.errors import CheckpointError, RunStateError, SchemaVersionError
from dflash.evaluate.table import WIDTH
from dflash.model.export import import_drafter
from dflash.records import EvaluationResult, RunPaths, RunSummary, from_json, to_json
from dflash.stages import Run, closing_text, load_report, load_result, load_summary, reopen_run, summarise_stage
from dflash.stages.run import note_reused
from dflash.train.follow import LogFollower
from tests.support.tiny_run import build_tiny_run
from tests.support.trainer_process import train_to_end
from tests.unit.tracking.tracking_fakes import FakeStore

pytestmark = pytest.mark.usefixtures("without_pictures")
RESULT = EvaluationResult(
    drafter="trained",
    step=12,
    dataset="synthetic-11",
    prompts=4,
    block_size=4,
    temperature=0.0,
    template_flags={},
    verifications=10,
    drafted=30,
    accepted=14,
    committed_tokens=24,
    acceptance_length=2.4,
    acceptance_length_untruncated=2.5,
    accepted_length=1.4,
    acceptance_length_macro=2.3,
    acceptance_ci=(2.1, 2.7),
    confidence=0.95,
    survival_per_position=(0.8, 0.4, 0.2),
    conditional_per_position=(0.8, 0.5, 0.5),
    acceptance_histogram=(2, 4, 2, 2),
    slices={},
    plain_s_per_token=0.002,
    speculative_s_per_token=0.001,
    speedup=2.0,
    lossless=True,
    differing_prompts=0,
    near_tie_prompts=0,
    warnings=(),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A really trained tiny run."""
    run = build_tiny_run(tmp_path_factory.mktemp("summary"))
    train_to_end(run)
    return run.paths


@pytest.fixture
def run(trained: RunPaths) -> Run:
    """The trained run without anything that later stages leave."""
    for name in ("summary.json", "reused.json", "health/report.json"):
        (trained.root / name).unlink(missing_ok=True)
    for file in trained.eval_dir.rglob("result.json"):
        file.unlink()
    return reopen_run(trained.root)


def store(paths: RunPaths, result: EvaluationResult, *, which: str) -> None:
    folder = paths.eval_dir / f"{which}-step-{result.step}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(to_json(replace(result, drafter=which)))


def evaluated(run: Run) -> None:
    store(run.paths, RESULT, which="trained")
    store(run.paths, replace(RESULT, step=0, acceptance_length=1.01), which="untrained")


@pytest.mark.draws
def test_the_summary_gathers_what_the_stages_left(run: Run) -> None:
    evaluated(run)
    note_reused(run.paths, "data set abc (24 samples)")
    summary = summarise_stage(run)
    follower = LogFollower(run.paths.log)
    follower.poll()
    assert summary == load_summary(run.paths.root)
    assert (summary.acceptance_length, summary.acceptance_length_untrained) == (2.4, 1.01)
    assert summary.acceptance_ci95 == (2.1, 2.7)
    assert summary.acceptance_per_position == RESULT.survival_per_position
    assert summary.steps == follower.end
    assert summary.feature_wait_frac == follower.wait_frac()
    assert summary.checkpoint == str(run.paths.checkpoint(summary.steps))
    assert summary.reused == ("data set abc (24 samples)",)
    assert summary.health_verdict == load_report(run.paths).verdict
    assert summary.mlflow_run_id is None, "tracking is switched off"
    assert summary.warnings == (f"acceptance is that of step {RESULT.step}, the last checkpoint is step {summary.steps}",)
    raw = json.loads(run.paths.summary.read_text())
    assert raw["schema_version"] == 1


def test_a_store_that_was_away_during_the_whole_training_hears_all_of_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = FakeStore()
    monkeypatch.setattr("dflash.tracking.open.Store", lambda *_arguments, **_named: mlflow.connect())
    evaluated(run)
    summarise_stage(reopen_run(run.paths.root, overrides=("tracking.enabled=true",)))
    (told,) = mlflow.runs.values()
    assert told["status"] == "FINISHED"
    assert told["params"]["train.epochs"] == str(run.config.train.epochs)
    assert told["datasets"] == [read_data_pointer(run.paths).fingerprint]
    assert {point.step for point in told["points"] if point.name == "train/loss"} == set(range(load_summary(run.paths.root).steps))


def test_the_export_holds_the_last_checkpoint_bit_for_bit(run: Run) -> None:
    evaluated(run)
    summary = summarise_stage(run)
    stored = load_checkpoint(Path(summary.checkpoint))
    exported = import_drafter(run.paths.export_dir, tables=None)
    assert exported.description.mask_token_id == stored.manifest.mask_token_id
    tensors = exported.drafter.state_dict()
    assert tensors.keys() == stored.drafter.keys()
    assert all(tensors[name].equal(value) for name, value in stored.drafter.items())


def test_one_lossy_evaluation_makes_the_run_lossy(run: Run) -> None:
    store(run.paths, RESULT, which="trained")
    store(run.paths, replace(RESULT, step=0, lossless=False), which="untrained")
    assert summarise_stage(run).lossless is False


@pytest.mark.parametrize("missing", ["trained", "untrained"])
def test_a_missing_stage_is_named_and_nothing_is_written(run: Run, missing: str) -> None:
    if missing != "trained":
        store(run.paths, RESULT, which="trained")
    if missing != "untrained":
        store(run.paths, replace(RESULT, step=0), which="untrained")
    with pytest.raises(RunStateError, match=missing):
        summarise_stage(run)
    assert not run.paths.summary.exists()


def test_a_run_that_was_never_trained_is_refused(tmp_path: Path) -> None:
    fresh = build_tiny_run(tmp_path)
    with pytest.raises(RunStateError, match="never trained"):
        summarise_stage(reopen_run(fresh.paths.root))


def test_a_damaged_last_checkpoint_is_refused(tmp_path: Path) -> None:
    broken = build_tiny_run(tmp_path)
    train_to_end(broken)
    newest = max(broken.paths.checkpoints_dir.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    file = newest / "drafter.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 0x10
    file.write_bytes(data)
    with pytest.raises(CheckpointError):
        summarise_stage(reopen_run(broken.paths.root))
    assert not broken.paths.export_dir.exists()


def test_the_newest_evaluation_counts_by_number_not_by_name(run: Run) -> None:
    store(run.paths, replace(RESULT, step=9, acceptance_length=1.5), which="trained")
    store(run.paths, replace(RESULT, step=10, acceptance_length=1.9), which="trained")
    assert load_result(run.paths, "trained").step == 10


def test_the_closing_table_names_commands_that_exist(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    evaluated(run)
    text = closing_text(run, summarise_stage(run))
    assert "1.01 -> 2.40" in text
    commands = [line.strip() for line in text.splitlines() if " -m dflash " in line]
    assert {command.split()[3] for command in commands} == {"health", "compare"}
    assert all(command.startswith((sys.executable, ".venv")) for command in commands)
    assert all(len(line) <= WIDTH for line in text.splitlines() if str(run.paths.root) not in line)
    assert main(["compare", "OTHER_RUN", str(run.paths.root)]) == 1
    assert "OTHER_RUN is not a run" in capsys.readouterr().err


def test_a_summary_of_another_version_is_refused(run: Run) -> None:
    evaluated(run)
    raw = json.loads(to_json(summarise_stage(run))) | {"schema_version": 2}
    run.paths.summary.write_text(json.dumps(raw))
    with pytest.raises(SchemaVersionError, match="schema version 2"):
        load_summary(run.paths.root)
    assert from_json(RunSummary, json.dumps(raw | {"schema_version": 1}), origin="x").run == run.name
