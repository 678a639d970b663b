"""The whole chain on the shipped target, through the command line in real processes, at the smallest size that is real."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dflash.cli import main
from dflash.errors import EXIT_BLIND, EXIT_OK, EXIT_USER_ERROR
from dflash.records import RunSummary, from_json
from dflash.stages import load_report, load_result, reopen_run
from tests.support.planted_secrets import PLANTED, find_planted

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMALL = (
    "data.num_conversations=40",
    "data.max_bad_frac=0.5",
    "train.max_steps=24",
    "train.epochs=6",
    "checkpoint.interval_steps=8",
    "checkpoint.window_steps=8",
    "checkpoint.soak_steps=8",
    "evaluate.num_prompts=4",
    "evaluate.untrained_prompts=2",
    "evaluate.max_new_tokens=24",
)


def dflash(*arguments: str, expect: int = 0) -> Any:
    """Run a command in its own process and return its JSON."""
    environment = (
        {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))} | {"OMP_NUM_THREADS": "1"} | PLANTED
    )
    command = [sys.executable, "-m", "dflash", *arguments, "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == expect, done.stderr
    return json.loads(done.stdout)


def in_this_process(capsys: pytest.CaptureFixture[str], *arguments: str, expect: int = 0) -> Any:
    """Run a command that already had a process of its own here, or elsewhere, without paying for its imports again."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("PREFECT_", "MLFLOW_"))]:
            patch.delenv(name)
        for name, value in PLANTED.items():
            patch.setenv(name, value)
        patch.chdir(ROOT)
        capsys.readouterr()
        code = main([*arguments, "--json"])
        said = capsys.readouterr()
        assert code == expect, said.err
        return json.loads(said.out)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline") / "runs"


@pytest.fixture(scope="module")
def finished(root: Path) -> Path:
    """A run that was trained and evaluated."""
    trained = dflash("train", "configs/demo.yaml", f"run.root={root}", *SMALL)
    dflash("evaluate", trained["run"])
    return Path(trained["run"])


def test_the_summary_holds_the_promised_keys(finished: Path) -> None:
    raw = json.loads((finished / "summary.json").read_text())
    assert raw.keys() >= {
        "acceptance_length", "acceptance_length_untrained", "acceptance_ci95", "acceptance_per_position", "speedup", "lossless",
        "padding_efficiency", "longest_bucket_run", "feature_wait_frac", "health_verdict", "checkpoint",
    }  # fmt: skip
    summary = from_json(RunSummary, json.dumps(raw), origin="summary.json")
    assert summary.lossless is True
    assert summary.steps == 24
    assert summary.acceptance_ci95[0] <= summary.acceptance_length <= summary.acceptance_ci95[1]
    assert len(summary.acceptance_per_position) == 7
    assert Path(summary.checkpoint).name == "step-24"
    assert summary.longest_bucket_run <= 3


def documented_commands() -> list[list[str]]:
    """Words behind `python -m dflash` of what the pages of a first use do with a finished run, the quick ones."""
    pages = [ROOT / name for name in ("README.md", "docs/quickstart.md", "docs/health.md")]
    lines = [line.split("  #")[0] for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    words = [shlex.split(line)[3:] for line in lines if line.startswith("python -m dflash ") and "runs/demo-001" in line]
    kept = [each for each in words if each[0] in ("health", "trace", "checkpoint", "export", "publish")]
    return [each for index, each in enumerate(kept) if each not in kept[:index] and not {"--watch", "--explain"} & set(each)]


def test_commands_of_the_first_pages_work_as_they_stand(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = documented_commands()
    assert {command[0] for command in commands} == {"health", "trace", "checkpoint", "export", "publish"}
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/demo-001").symlink_to(finished)
    monkeypatch.chdir(tmp_path)
    for command in commands:
        assert main(command) == (EXIT_BLIND if command[0] == "health" else EXIT_OK), f"{command}: {capsys.readouterr().err}"
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "trace.json", "drafter", "published", "page.html"}


def test_every_step_of_the_plan_is_in_the_log_exactly_once(finished: Path) -> None:
    lines = [json.loads(line) for line in (finished / "train_log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [step["step"] for step in steps] == list(range(24))
    assert [micro["batch_id"] for step in steps for micro in step["micro_batches"]] == list(range(24))
    first_epoch = [row for step in steps for micro in step["micro_batches"] if micro["epoch"] == 0 for row in micro["rows"]]
    assert len(first_epoch) == len(set(first_epoch))


def test_the_health_report_says_what_it_checked(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = load_report(reopen_run(finished).paths)
    assert report.records == 24
    assert {"non-finite", "loss spike", "step integrity"} <= {detector.detector for detector in report.detectors}
    assert (finished / "health/report.html").stat().st_size > 1000
    # 24 steps are too few for any bucket's baseline: blind is not healthy, and has an exit code of its own.
    assert report.verdict == "blind"
    assert in_this_process(capsys, "health", str(finished), expect=EXIT_BLIND)["verdict"] == "blind"


def test_checkpoints_end_up_judged_and_the_export_is_the_last_one(finished: Path) -> None:
    states = {}
    for line in (finished / "checkpoints/ledger.jsonl").read_text().splitlines():
        entry = json.loads(line)
        states[entry["step"]] = entry["state"]
    assert states[0] == "clean"
    assert (finished / "checkpoints/latest").read_text().strip() == "step-24"
    config = json.loads((finished / "export/config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"]["target_layer_ids"] == [0, 1, 2]


def test_the_evaluation_keeps_one_row_a_verification(finished: Path) -> None:
    result = load_result(reopen_run(finished).paths, "trained")
    table = pq.read_table(finished / "eval/trained-step-24/verifications.parquet")
    assert table.num_rows == result.verifications
    assert sum(table.column("accepted").to_pylist()) == result.accepted


def test_a_second_run_reuses_the_data_and_gives_the_same_losses(
    finished: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = in_this_process(capsys, "train", "configs/demo.yaml", f"run.root={root}", *SMALL)
    assert Path(again["run"]).name == "demo-002"
    assert json.loads((Path(again["run"]) / "reused.json").read_text())[0].startswith("data set")

    def losses(run: Path) -> list[float]:
        lines = map(json.loads, (run / "train_log.jsonl").read_text().splitlines())
        return [line["ce"] for line in lines if line["kind"] == "step"]

    assert losses(finished) == losses(Path(again["run"])), "training is deterministic on a CPU"
    in_this_process(capsys, "evaluate", again["run"])
    compared = dflash("compare", str(finished), again["run"])
    assert compared["runs"] == ["demo-001", "demo-002"]
    assert compared["acceptance"]["all"]["demo-001"] == compared["acceptance"]["all"]["demo-002"]
    assert (compared["verdicts"][0]["word"], compared["settings"], compared["data"]) == ("no difference", {}, {})
    assert (finished.parent / "comparisons/demo-001-vs-demo-002/comparison.html").stat().st_size > 10_000


def test_nothing_that_is_written_tells_a_secret_of_the_environment(finished: Path) -> None:
    assert (finished.parent / "mlflow.db").is_file()
    assert find_planted(finished.parent, secrets=PLANTED) == []


def test_a_flipped_byte_in_a_checkpoint_is_refused_by_name(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = Path(shutil.copytree(finished / "checkpoints/step-24", tmp_path / "step-24"))
    weights = bytearray((damaged / "drafter.safetensors").read_bytes())
    weights[-1] ^= 1
    (damaged / "drafter.safetensors").write_bytes(weights)
    before = sorted(finished.rglob("*"))
    error = in_this_process(capsys, "evaluate", str(finished), "--checkpoint", str(damaged), expect=EXIT_USER_ERROR)
    assert error["error"] == "CheckpointError"
    assert "drafter.safetensors" in error["what"]
    assert sorted(finished.rglob("*")) == before, "nothing half-written"
