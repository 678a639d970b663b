"""The gradient guard: pure rules, and what the trainer makes of them in a log."""

from __future__ import annotations

import json
import math
import statistics
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.checkpoint import read_state
from dflash.records import GuardState, TrainerState, from_json, to_json
from dflash.train.group import Alone
from dflash.train.guard import KEPT_NORMS, MAX_IN_ROW, MIN_NORMS, NEW_GUARD, kind_of, norm_limit, remember
from dflash.train.inputs import open_inputs
from dflash.train.models import load_models
from dflash.train.segment import run_segment
from tests.support.tiny_run import TinyRun, build_tiny_run

PURE = settings(max_examples=60, deadline=None, derandomize=True)


def fed(norms: list[float], kind: str = "0") -> GuardState:
    guard: GuardState | None = NEW_GUARD
    for norm in norms:
        guard = remember(guard, kind, norm=norm, accepted=True)
    assert guard is not None
    return guard


def test_steps_of_one_bucket_are_judged_among_themselves_and_mixed_ones_together() -> None:
    assert kind_of([3, 3]) == "3"
    assert kind_of([3, 4]) == kind_of([0, 1, 2]) == "mixed"


@PURE
@given(st.lists(st.floats(1e-3, 1e3), max_size=3 * KEPT_NORMS), st.floats(1.5, 20))
def test_the_limit_is_a_multiple_of_the_median_of_the_newest_accepted_norms(norms: list[float], over: float) -> None:
    guard = fed(norms)
    limit = norm_limit(guard, "0", over=over)
    if len(norms) < MIN_NORMS:
        assert limit == math.inf
    else:
        assert limit == over * statistics.median(norms[-KEPT_NORMS:])
    assert norm_limit(guard, "1", over=over) == math.inf, "another kind of step knows nothing of these"


def test_off_means_no_limit_and_no_memory() -> None:
    assert norm_limit(None, "0", over=None) == math.inf
    assert remember(None, "0", norm=1.0, accepted=True) is None


def test_a_lasting_rise_is_learnt_after_a_few_skips_in_a_row() -> None:
    guard = fed([1.0] * MIN_NORMS)
    skips = 0
    for _ in range(200):
        accepted = norm_limit(guard, "0", over=3.0) >= 10.0
        skips += not accepted
        after = remember(guard, "0", norm=10.0, accepted=accepted)
        assert after is not None
        guard = after
        assert guard.skipped_in_row <= MAX_IN_ROW
    assert skips < 200
    assert norm_limit(guard, "0", over=3.0) == 30.0


def test_the_state_survives_json_bit_for_bit() -> None:
    guard = fed([1 / 3, 1e-17, 7.1], kind="mixed")
    assert from_json(GuardState, to_json(guard), origin="x") == guard


def train(run: TinyRun, *, resume_step: int | None, segment: int) -> TrainerState:
    inputs = open_inputs(run.config, run.paths)
    with inputs.store:
        models = load_models(run.config)
        return run_segment(
            inputs,
            models,
            segment=segment,
            resume_step=resume_step,
            stop=threading.Event(),
            on_operation=lambda _: None,
            group=Alone(),
        )


def test_skips_are_logged_change_nothing_and_are_the_same_after_a_resume(tmp_path: Path) -> None:
    # 1.001 x the median forbids about every second update that it may.
    run = build_tiny_run(
        tmp_path,
        samples=40,
        overrides=["train.epochs=6", "train.skip_update_if_grad_over=1.001", "checkpoint.keep_other=50", "train.lr=0.003"],
    )
    last = train(run, resume_step=None, segment=0)
    lines = [json.loads(line) for line in run.paths.log.read_text().splitlines()]
    steps = {line["step"]: line for line in lines if line["kind"] == "step"}
    skips = [line for line in lines if line.get("event") == "skip"]
    assert skips
    for event in skips:
        record = steps[event["step"]]
        assert record["skipped"] and record["nonfinite"] == [] and record["clip_coef"] is None
        assert record["grad_norm"] == event["details"]["grad_norm"] > event["details"]["limit"]
        assert event["details"]["batch_ids"] == [item["batch_id"] for item in record["micro_batches"]]
    assert {event["step"] for event in skips} == {step for step, record in steps.items() if record["skipped"]}
    middle = max(step for step in steps if step % 4 == 0 and step > skips[0]["step"] and run.paths.checkpoint(step).is_dir())
    assert read_state(run.paths.checkpoint(middle)).guard is not None
    again = train(run, resume_step=middle, segment=1)
    assert again.guard == last.guard
    resumed = [json.loads(line) for line in run.paths.log.read_text().splitlines()][len(lines) :]
    found = {line["step"]: line["skipped"] for line in resumed if line["kind"] == "step"}
    assert found == {step: record["skipped"] for step, record in steps.items() if step >= middle}


def test_without_the_option_the_state_holds_no_guard(tmp_path: Path) -> None:
    run = build_tiny_run(tmp_path, overrides=["train.max_steps=2"])
    assert train(run, resume_step=None, segment=0).guard is None


@pytest.mark.parametrize("norm", [1.0, 5.0])
def test_a_skip_is_forgotten_once_an_update_is_accepted(norm: float) -> None:
    guard = remember(fed([1.0] * MIN_NORMS), "0", norm=9.0, accepted=False)
    assert guard is not None and guard.skipped_in_row == 1
    assert guard.norms == fed([1.0] * MIN_NORMS).norms
    after = remember(guard, "0", norm=norm, accepted=True)
    assert after is not None and after.skipped_in_row == 0
