"""Planted faults: refused outside a drill, silent without one, and where a drill plants one the trainer really suffers it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.checkpoint import read_manifest
from dflash.config import DrafterConfig
from dflash.errors import EXIT_OK, EXIT_USER_ERROR
from dflash.model.drafter import Drafter
from dflash.records import FaultName, FaultPlan, MicroBatchRecord, RunPaths, StepRecord, to_json
from dflash.train.planted import SHORT_LOSS_FACTOR, PlantedFaults, add_noise, short_window
from dflash.train.planted_log import planted_lines
from dflash.train.worker import train_segment
from tests.support.tiny_run import TinyRun, build_tiny_run

DRILL = ("drill.faults=true", "train.max_steps=8", "train.max_nonfinite_in_row=9")


def plan_of(name: FaultName, *, bad: int = 0, step: int = 3) -> FaultPlan:
    return FaultPlan(name, step, step, step + bad, 1)


def plant(run: TinyRun, plan: FaultPlan) -> None:
    run.paths.control_dir.mkdir(parents=True, exist_ok=True)
    run.paths.planted_fault.write_text(to_json(plan))


def train(run: TinyRun, *, segment: int = 0, resume_step: int | None = None) -> int:
    return train_segment(run.paths, segment=segment, resume_step=resume_step, on_operation=lambda _name: None)


def steps_of(paths: RunPaths, *, segment: int = 0) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in paths.log.read_text().splitlines() if line]
    return [line for line in lines if line["kind"] == "step" and line["segment"] == segment]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planted")


def run_with(root: Path, plan: FaultPlan | None, overrides: Sequence[str] = DRILL) -> TinyRun:
    run = build_tiny_run(root, overrides=overrides)
    if plan is not None:
        plant(run, plan)
    return run


def weights(run: TinyRun) -> str:
    return read_manifest(run.paths.checkpoint(8)).files[0].sha256


def test_a_fault_in_a_run_that_is_no_drill_is_refused_before_the_first_step(root: Path) -> None:
    run = run_with(root, plan_of("nan", bad=3), ("train.max_steps=8",))
    assert train(run) == EXIT_USER_ERROR
    assert not run.paths.log.exists()
    assert not run.paths.planted_log.exists()


def test_bad_batches_are_bad_again_in_the_next_segment(root: Path) -> None:
    run = run_with(root, plan_of("nan", bad=2, step=5))
    assert train(run) == EXIT_OK
    assert [record["step"] for record in steps_of(run.paths) if record["skipped"]] == [5, 6]
    assert train(run, segment=1, resume_step=4) == EXIT_OK
    assert [record["step"] for record in steps_of(run.paths, segment=1) if record["skipped"]] == [5, 6]
    assert [(line.segment, line.step, line.position) for line in planted_lines(run.paths)] == [
        (0, 5, 5), (0, 6, 6), (1, 5, 5), (1, 6, 6),
    ]  # fmt: skip


def test_an_artefact_in_the_log_changes_no_weight_and_an_explosion_does(root: Path) -> None:
    plain, artefact, exploded = (run_with(root, plan) for plan in (None, plan_of("save-artefact"), plan_of("explosion", bad=1)))
    for run in (plain, artefact, exploded):
        assert train(run) == EXIT_OK
    assert planted_lines(plain.paths) == []
    assert weights(artefact) == weights(plain) != weights(exploded)
    losses = {run.paths: [record["ce"] for record in steps_of(run.paths)] for run in (plain, artefact)}
    differing = [step for step, pair in enumerate(zip(*losses.values(), strict=True)) if pair[0] != pair[1]]
    assert differing == [4], "the record after the save of step-4"
    norms = [record["grad_norm"] for record in steps_of(exploded.paths)]
    assert max(norms) == norms[3] > 1000 * norms[2]


def test_what_happens_once_is_over_in_the_next_segment(root: Path) -> None:
    run = run_with(root, plan_of("bad-resume"))
    assert train(run) == EXIT_OK
    assert planted_lines(run.paths) == [], "nothing was resumed yet"
    for segment, expected in ((1, [(1, 4)]), (2, [(1, 4)])):
        assert train(run, segment=segment, resume_step=4) == EXIT_OK
        assert [(line.segment, line.step) for line in planted_lines(run.paths)] == expected
    second, third = (steps_of(run.paths, segment=number) for number in (1, 2))
    assert third[0]["ce"] == steps_of(run.paths)[4]["ce"] != second[0]["ce"]


def test_the_ramp_grows_for_as_long_as_its_segment_lasts(tmp_path: Path) -> None:
    drafter = Drafter(DrafterConfig(hidden_size=8, intermediate_size=8, num_attention_heads=1, num_key_value_heads=1, head_dim=8),
        target_hidden_size=8)  # fmt: skip
    drafter.init_weights(0)
    paths = RunPaths(tmp_path)
    paths.control_dir.mkdir()
    faults = PlantedFaults(plan_of("ramp", step=10), paths, segment=0, interval_steps=4)
    moved = []
    for step in (9, 10, 40):
        before = [parameter.detach().clone() for parameter in drafter.parameters()]
        faults.step = step
        faults.rot(drafter)
        moved.append(sum(float((new.detach() - old).norm()) for new, old in zip(drafter.parameters(), before, strict=True)))
    assert moved[0] == 0 < moved[1] < moved[2]
    later = PlantedFaults(plan_of("ramp", step=10), paths, segment=1, interval_steps=4)
    later.step = 40
    before = [parameter.detach().clone() for parameter in drafter.parameters()]
    later.rot(drafter)
    assert all(torch.equal(new, old) for new, old in zip(drafter.parameters(), before, strict=True))


def test_noise_is_a_share_of_the_weights_and_the_same_everywhere() -> None:
    made = []
    for _ in range(2):
        drafter = Drafter(DrafterConfig(hidden_size=64, num_attention_heads=2, num_key_value_heads=1), target_hidden_size=64)
        drafter.init_weights(3)
        before = {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}
        add_noise(drafter, share=0.5, seed=7)
        made.append({name: parameter.detach() - before[name] for name, parameter in drafter.named_parameters()})
        for name, noise in made[-1].items():
            if noise.numel() > 1000:
                assert float(noise.square().mean().sqrt() / before[name].square().mean().sqrt()) == pytest.approx(0.5, rel=0.1)
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


def test_a_save_hangs_once_in_the_first_one_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash.train.planted.HANG_S", 0.0)
    paths = RunPaths(tmp_path)
    paths.control_dir.mkdir()
    faults = PlantedFaults(plan_of("hung-save", step=10), paths, segment=0, interval_steps=4)
    seen: list[str] = []
    operation = faults.operation(seen.append)
    for step in (8, 12, 16):
        faults.step = step
        for name in ("drafter", "optimizer"):
            operation(name)
    assert seen == ["drafter", "optimizer"] * 3
    assert [line.step for line in planted_lines(paths)] == [12]


def test_a_short_window_is_few_tokens_with_a_high_loss_and_no_hit() -> None:
    batch = MicroBatchRecord(
        batch_id=1, bucket=0, epoch=0, rows=(1, 2), padded_length_tokens=8, length_min_tokens=4, length_max_tokens=8,
        length_sum_tokens=12, n_seqs=2, n_tokens=60, n_blocks=20, supervised_tokens=9, covered_tokens=9, ce_sum=60.0,
        objective_sum=60.0, objective_weight=60.0, accepted_sum=30.0, correct=(9, 8, 7), valid=(20, 20, 20),
    )  # fmt: skip
    record = StepRecord(
        segment=0, step=4, wall_time_s=0.0, mono_time_s=0.0, ce=1.0, objective=1.0, accuracy=0.4, accepted_length=1.5,
        coverage_frac=1.0, grad_norm=1.0, clip_coef=1.0, lr=0.1, warmup_factor=1.0, skipped=False, nonfinite=(),
        micro_batches=(batch,), plan_position=2, padding_frac=0.0, step_time_s=0.1, wait_time_s=0.0, tokens_per_s=1.0,
        ready_depth=0, feature_depth=0, target_depths=(1,),
    )  # fmt: skip
    cut = short_window(record)
    assert cut.ce == SHORT_LOSS_FACTOR
    assert cut.accuracy == 0
    (only,) = cut.micro_batches
    assert (only.n_tokens, only.n_seqs, sum(only.correct)) == (3, 1, 0)
    assert only.ce_sum is not None
    assert math.isclose(only.ce_sum / only.n_tokens, SHORT_LOSS_FACTOR)
    assert cut.grad_norm == record.grad_norm
