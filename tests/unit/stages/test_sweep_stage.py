"""Sweeps and baselines of a run: what is written, what the closing table and the command line say of it, what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash.checkpoint import CheckpointContent, Ledger, RunIdentity, save_checkpoint
from dflash.cli import main
from dflash.errors import EvaluationError, NotLosslessError, RunStateError
from dflash.evaluate.candidates import Candidate, lookup_candidate
from dflash.evaluate.sweep_text import setting_text
from dflash.evaluate.table import WIDTH, closing_table
from dflash.model.drafter import Drafter
from dflash.records import RivalTable, RunSummary, SweepResult, TrainerState, from_json
from dflash.stages import sweep as sweep_module
from dflash.stages.evaluate import EvaluationBench, evaluate_stage, load_result, open_bench
from dflash.stages.export import write_checkpoint
from dflash.stages.rivals import load_rivals, with_baselines
from dflash.stages.run import Run, reopen_run
from dflash.stages.sweep import load_sweep, open_sweep_bench, sweep_stage
from tests.support.checkpoints import entry, ignore
from tests.support.probe_run import build_probe_run, save_drafter

OVERRIDES = (
    "evaluate.num_prompts=3", "evaluate.max_new_tokens=6", "evaluate.sweep.num_prompts=3", "evaluate.sweep.max_new_tokens=5",
    "evaluate.sweep.block_sizes=[2,4]", "evaluate.sweep.batch_sizes=[1,3]", "evaluate.sweep.temperatures=[0.0,0.7]",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = build_probe_run(tmp_path_factory.mktemp("swept"), overrides=OVERRIDES)
    for step in (0, 10):
        save_for_its_target(run, step)
    return run


@pytest.fixture(scope="module")
def bench(run: Run) -> EvaluationBench:
    torch.set_num_threads(1)
    return open_bench(run)


@pytest.fixture(scope="module")
def swept(run: Run, bench: EvaluationBench) -> SweepResult:
    return sweep_stage(run, bench, progress=quiet)


@pytest.fixture(scope="module")
def published(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "champion"
    return write_checkpoint(
        run.config, run.paths.checkpoint(10), output=folder, layout="zlab", dtype="float32", target_name="demo"
    )  # fmt: skip


def quiet(_label: str, _done: int, _total: int) -> None:
    """Progress that nobody watches."""


def save_for_its_target(run: Run, step: int) -> None:
    """As `save_drafter`, with the fingerprint of the target that it was made for."""
    manifest = json.loads((Path(json.loads((run.paths.root / "data.json").read_text())["dir"]) / "manifest.json").read_text())
    drafter = Drafter(run.config.drafter, target_hidden_size=128)
    drafter.init_weights(step)
    state = TrainerState(
        step=step, plan_position=step, segment=0, plan_sha256="p" * 64, config_sha256="c" * 64, seed=1, total_steps=100,
        skipped_positions=(), overlay=None, nonfinite_in_row=0,
    )  # fmt: skip
    identity = RunIdentity("d" * 64, manifest["target_fingerprint"], manifest["mask_token_id"])
    weights = {name: tensor.detach().clone() for name, tensor in drafter.named_parameters()}
    content = CheckpointContent(state=state, identity=identity, drafter=weights, optimizer={"m": torch.zeros(1)})
    save_checkpoint(run.paths.checkpoints_dir, content, created_at="2026-01-01T00:00:00+00:00", on_operation=ignore)
    ledger = Ledger(run.paths.ledger)
    for state_name in ("writing", "durable", "probation"):
        ledger.append(entry(step, state_name))  # type: ignore[arg-type]


def test_a_sweep_is_written_and_found_again(run: Run, swept: SweepResult) -> None:
    assert load_sweep(run.paths) == swept
    assert (swept.step, swept.trained_block_size, swept.prompts, len(swept.cells)) == (10, 8, 3, 12)
    folder = run.paths.eval_dir / "sweep-step-10"
    assert {file.name for file in folder.iterdir()} == {"sweep.json", "sweep.txt", "sweep.png"}
    assert "best here" in (folder / "sweep.txt").read_text()
    assert from_json(SweepResult, (folder / "sweep.json").read_bytes(), origin="sweep.json").best == max(
        swept.cells, key=lambda cell: cell.tokens_per_s
    )


def test_a_sweep_without_its_last_file_is_none(run: Run, swept: SweepResult, tmp_path: Path) -> None:
    assert swept.best is not None
    root = tmp_path / "eval" / "sweep-step-10"
    root.mkdir(parents=True)
    (root / "sweep.txt").write_text("half")
    assert load_sweep(replace(run.paths, root=tmp_path)) is None


def test_a_sweep_that_is_not_lossless_is_written_and_refused(
    run: Run, bench: EvaluationBench, swept: SweepResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled = tuple(replace(cell, lossless=cell.block_size != 4, differing_prompts=2) for cell in swept.cells)
    monkeypatch.setattr(sweep_module, "run_sweep", lambda *_, **__: spoiled)
    with pytest.raises(
        NotLosslessError, match="4 of 12 settings are not lossless, first block size 4, batch size 1, temperature 0"
    ):
        sweep_stage(run, bench, progress=quiet)
    found = load_sweep(run.paths)
    assert found is not None and found.best.block_size != 4
    sweep_module.write_sweep(swept, run.paths.eval_dir / "sweep-step-10")


def test_the_command_line_sweeps_with_settings_of_its_own(run: Run, swept: SweepResult, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "evaluate.sweep.batch_sizes=[2]", "--set", "evaluate.sweep.temperatures=[0.0]"]
    assert main(["evaluate", str(run.paths.root), "--sweep", "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(cell["block_size"], cell["batch_size"]) for cell in found["cells"]] == [(1, 2), (2, 2), (4, 2)]
    assert load_sweep(run.paths) == swept, "the run's own sweep stays"
    (beside,) = run.paths.eval_dir.glob("sweep-with-*-step-10/sweep.json")
    assert len(json.loads(beside.read_text())["cells"]) == 3
    assert main(["evaluate", str(run.paths.root), "--sweep", "--set", "train.lr=1"]) != 0
    assert "only keys of the section evaluate" in capsys.readouterr().err
    assert reopen_run(run.paths.root).config.evaluate.sweep.batch_sizes == (1, 3)


def test_the_serve_command_names_what_the_sweep_found(
    run: Run, swept: SweepResult, published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not run.paths.export_dir.exists():
        shutil.copytree(published, run.paths.export_dir)
    sweep_module.write_sweep(swept, run.paths.eval_dir / "sweep-step-10")
    assert main(["evaluate", str(run.paths.root), "--print-serve-command", "vllm"]) == 0
    said = capsys.readouterr().out
    assert f"step 10 was fastest with {setting_text(swept.best)}" in said
    assert "--enable-per-request-metrics" in said and "--set evaluate.server.concurrency=1" in said


def test_baselines_decode_the_prompts_of_the_drafter_beside_them(run: Run, bench: EvaluationBench, published: Path) -> None:
    names = ["prompt_lookup", "untrained", str(published), str(run.paths.checkpoint(10))]
    wanted = reopen_run(run.paths.root, overrides=[f"evaluate.baselines={json.dumps(names)}"])
    result = evaluate_stage(wanted, bench, which="trained", progress=quiet)
    table = load_rivals(run.paths)
    assert isinstance(table, RivalTable)
    labels = [row.label for row in table.rows]
    assert labels == ["plain", "prompt_lookup", "untrained", "champion", "probed-001_step-10", "trained"]
    plain, _, untrained, champion, same, trained = table.rows
    assert (trained.acceptance_length, trained.step) == (result.acceptance_length, 10) and plain.block_size == 1
    assert (untrained.step, champion.step, same.step) == (0, None, 10)
    # The same weights by two other ways: what is published and what is checkpointed give the same answers.
    assert champion.acceptance_length == same.acceptance_length == trained.acceptance_length
    assert champion.gain == same.gain == 0.0 and champion.gain_ci == same.gain_ci == (0.0, 0.0)
    assert all(row.lossless in (None, True) and row.prompts == 3 for row in table.rows)
    assert evaluate_stage(run, bench, which="trained", progress=quiet).acceptance_length == result.acceptance_length
    assert load_rivals(run.paths) is None, "an evaluation without baselines leaves no older table behind"


def test_what_one_call_measures_otherwise_lies_beside_the_run_s_own_result(
    run: Run, bench: EvaluationBench, capsys: pytest.CaptureFixture[str]
) -> None:
    own = evaluate_stage(run, bench, which="trained", progress=quiet)
    before = {path: path.read_bytes() for path in run.paths.eval_dir.glob("trained-step-10/*")}
    words = ["evaluate", str(run.paths.root), "--set", "evaluate.max_new_tokens=3"]
    assert main([*words, "--baseline", "prompt_lookup"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told[-3:]] == ["plain", "prompt_lookup", "trained"], (
        "baselines that were asked for are shown"
    )
    assert main([*words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert "baselines" not in shown
    (beside,) = run.paths.eval_dir.glob("trained-with-*-step-10/result.json")
    assert json.loads(beside.read_text())["acceptance_length"] == shown["acceptance_length"]
    assert {path: path.read_bytes() for path in run.paths.eval_dir.glob("trained-step-10/*")} == before
    assert load_result(run.paths, "trained") == own
    assert not run.paths.summary.exists()


def test_a_checkpoint_of_another_run_leaves_no_result_in_this_one(run: Run, bench: EvaluationBench, tmp_path: Path) -> None:
    before = sorted(run.paths.eval_dir.rglob("*"))
    copy = Path(shutil.copytree(run.paths.checkpoint(10), tmp_path / "checkpoints" / "step-10"))
    with pytest.raises(RunStateError, match="no checkpoint of run") as refused:
        evaluate_stage(run, bench, which="trained", progress=quiet, checkpoint=copy)
    assert f"--baseline {copy}" in refused.value.remedy
    assert sorted(run.paths.eval_dir.rglob("*")) == before


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (["nothing-here"], EvaluationError, "'nothing-here' is neither prompt_lookup nor untrained, nor a folder"),
        (["untrained", "untrained"], EvaluationError, "names one twice"),
    ],
)
def test_what_is_no_baseline_is_named(
    run: Run, bench: EvaluationBench, names: list[str], error: type[Exception], message: str
) -> None:
    judged = lookup_candidate(bench.target, block_size=4)
    with pytest.raises(error, match=message):
        with_baselines(run, bench.target, judged, names=names)


def test_what_is_no_baseline_is_refused_before_the_target_is_loaded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash.stages.evaluate.load_data", lambda *_arguments, **_more: pytest.fail("the data set is opened"))
    with pytest.raises(EvaluationError, match="'nothing-here' is neither"):
        open_bench(reopen_run(run.paths.root, overrides=['evaluate.baselines=["untrained", "nothing-here"]']))


def test_a_sweep_goes_on_without_a_baseline_that_is_missing_and_says_so(
    run: Run, bench: EvaluationBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened: list[Run] = []
    monkeypatch.setattr(sweep_module, "open_bench", lambda each: opened.append(each) or bench)
    gone = reopen_run(run.paths.root, overrides=['evaluate.baselines=["nothing-here"]'])
    assert open_sweep_bench(gone) is bench
    assert opened[0].config.evaluate.baselines == ()
    assert "goes on" in caplog.text and "'nothing-here' is neither" in caplog.text
    caplog.clear()
    open_sweep_bench(run)
    assert not caplog.text


@pytest.mark.parametrize(
    "words",
    [["--sweep"], ["--drafter", "x"], ["--engine", "vllm", "--url", "http://127.0.0.1:9"], ["--print-serve-command", "vllm"]],
)
def test_a_baseline_is_refused_where_it_would_not_be_decoded(
    run: Run, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(run.paths.root), "--baseline", "untrained", *words]) == 1
    assert "--baseline is decoded beside" in capsys.readouterr().err


def test_two_baselines_of_one_name_are_refused(run: Run, bench: EvaluationBench, published: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(published, tmp_path / published.name))
    judged = lookup_candidate(bench.target, block_size=4)
    with pytest.raises(EvaluationError, match=f"would be called '{published.name}'"):
        with_baselines(run, bench.target, judged, names=[str(published), str(other)])


def test_a_drafter_of_another_target_is_refused(run: Run, bench: EvaluationBench) -> None:
    save_drafter(run, 30)
    judged: Candidate = lookup_candidate(bench.target, block_size=4)
    with pytest.raises(RunStateError, match="trained for another target"):
        with_baselines(run, bench.target, judged, names=[str(run.paths.checkpoint(30))])


def test_the_closing_table_names_the_best_setting(swept: SweepResult) -> None:
    summary = RunSummary(
        run="demo-001", acceptance_length=3.2, acceptance_length_untrained=1.0, acceptance_ci95=(3.0, 3.4),
        acceptance_per_position=(0.7,), speedup=1.6, lossless=True, padding_efficiency=0.97, longest_bucket_run=3,
        feature_wait_frac=0.05, health_verdict="healthy", checkpoint="c", steps=10, train_time_s=1.0, reused=(),
        mlflow_run_id=None, best_setting=swept.best,
    )  # fmt: skip
    text = closing_table(summary, commands=())
    assert "best setting" in text and f"{swept.best.tokens_per_s:.0f} tokens/s" in text
    assert all(len(line) <= WIDTH for line in text.splitlines())
    assert "best setting" not in closing_table(replace(summary, best_setting=None), commands=())
