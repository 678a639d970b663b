"""Label alignment and the overfit on a run's own batch, and what the examination says where it cannot look."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.config import TargetConfig, parse_config
from dflash.data.reader import Batch
from dflash.errors import PreflightError
from dflash.model.anchors import BlockLabels
from dflash.model.target import Target, load_target
from dflash.records import CheckResult
from dflash.train import features as features_module
from dflash.train.doctor import DoctorReport, alignment, examine, render_checks, require_passed
from dflash.train.doctor.alignment import (
    Overfit,
    alignment_checks,
    feature_maker,
    first_batch,
    first_rows,
    judge_labels,
    judge_overfit,
    overfit,
)
from dflash.train.doctor.data_checks import Expected, judge_manifest
from dflash.train.doctor.spot import collated
from dflash.train.features import FeatureMaker
from dflash.train.inputs import Inputs, open_inputs
from tests.support.tiny_run import MASK_TOKEN_ID, VOCAB_SIZE, TinyRun, build_tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return build_tiny_run(tmp_path_factory.mktemp("doctor-data"), overrides=["drafter.initializer_range=0.2"])


@pytest.fixture(scope="module")
def inputs(run: TinyRun) -> Iterator[Inputs]:
    opened = open_inputs(run.config, run.paths)
    with opened.store:
        yield opened


@pytest.fixture(scope="module")
def batch(inputs: Inputs) -> Batch:
    return first_batch(inputs)


@pytest.fixture(scope="module")
def target(run: TinyRun) -> Target:
    return load_target(run.config.target, target_layer_ids=(0, 1), device=torch.device("cpu"))


def maker_of(run: TinyRun, target: Target) -> FeatureMaker:
    return feature_maker(run.config, target, mask_token_id=MASK_TOKEN_ID, drafter_device=torch.device("cpu"))


def test_a_batch_of_the_run_is_labelled_right_and_can_be_learnt(run: TinyRun, target: Target, batch: Batch) -> None:
    labels, learnt = alignment_checks(maker_of(run, target), batch, time_limit_s=60.0)
    assert labels.status == "ok"
    assert "labels of" in labels.message
    assert learnt.status == "ok", learnt.message


def shifted(input_ids: Any, loss_mask: Any, lengths: Any, anchor_set: Any, *, block_size: int) -> BlockLabels:
    labels, valid = alignment_labels(input_ids, loss_mask, lengths, anchor_set, block_size=block_size)
    return BlockLabels(labels.roll(-1, dims=-1), valid)


def too_long(input_ids: Any, loss_mask: Any, lengths: Any, anchor_set: Any, *, block_size: int) -> BlockLabels:
    labels, valid = alignment_labels(input_ids, loss_mask, lengths, anchor_set, block_size=block_size)
    valid[..., 1:] = anchor_set.keep.unsqueeze(-1)
    return BlockLabels(labels, valid)


alignment_labels = features_module.block_labels


@pytest.mark.parametrize(("broken", "named"), [(shifted, "predicts"), (too_long, "supervised")])
def test_labels_that_are_off_are_found_although_they_could_be_learnt(
    broken: Any, named: str, run: TinyRun, target: Target, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features_module, "block_labels", broken)
    (result,) = alignment_checks(maker_of(run, target), batch, time_limit_s=60.0)
    assert (result.name, result.status) == ("labels", "fail")
    assert named in result.message


def test_an_anchor_without_loss_is_found(run: TinyRun, target: Target, batch: Batch) -> None:
    small = first_rows(batch, 2)
    features = maker_of(run, target).make(small)
    other = dataclasses.replace(small, loss_mask=~small.loss_mask)
    assert "carries no loss" in judge_labels(other, features).message


def test_a_batch_of_noise_features_is_still_learnt_but_a_dead_gradient_is_not(
    run: TinyRun, target: Target, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = maker_of(run, target)
    features = maker.make(first_rows(batch, 2))
    monkeypatch.setattr(alignment, "MAX_UPDATES", 10)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_: None)
    result = judge_overfit(overfit(maker, features, time_limit_s=60.0))
    assert result.status == "fail"
    assert "cannot be learnt" in result.message


@pytest.mark.parametrize(
    ("after", "updates", "accuracy", "status"),
    [
        (0.5, 30, 0.9, "ok"),
        (2.0, 30, 0.3, "warn"),
        (0.5, 30, 0.1, "warn"),
        (2.9, 30, 0.1, "fail"),
        (2.9, 3, 0.1, "warn"),
        (float("nan"), 30, 0.1, "fail"),
    ],
)
def test_the_overfit_is_judged_by_its_numbers(after: float, updates: int, accuracy: float, status: str) -> None:
    result = Overfit(ce=(3.0, after), accuracy=(0.1, accuracy), accepted=(0.1, 0.1), updates=updates, seconds=1.0)
    assert judge_overfit(result).status == status


def manifest_like(**changes: Any) -> Any:
    """The fields of a manifest that are compared."""
    fields = {**dataclasses.asdict(EXPECTED), "on_policy": True, "samples": 10, **changes}
    return type("Manifest", (), fields)()


EXPECTED = Expected("a" * 64, "b" * 64, {"enable_thinking": False}, "c" * 64, VOCAB_SIZE, MASK_TOKEN_ID)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokenizer_sha256": "d" * 64}, "tokenizer_sha256: data set dddddddddddd, here aaaaaaaaaaaa"),
        ({"template_sha256": "d" * 64}, "template_sha256"),
        ({"template_flags": {"enable_thinking": True}}, "template_flags: data set {'enable_thinking': True}"),
        ({"target_fingerprint": "d" * 64}, "target_fingerprint: answers by dddddddddddd"),
        ({"vocab_size": 50}, "vocab_size: data set 50, here 48"),
        ({"mask_token_id": 3}, "mask_token_id: data set 3, here 47"),
    ],
)
def test_a_data_set_of_another_target_template_or_mask_is_found(changes: dict[str, Any], named: str) -> None:
    assert judge_manifest(manifest_like(), EXPECTED).status == "ok"
    result = judge_manifest(manifest_like(**changes), EXPECTED)
    assert (result.status, named in result.message) == ("fail", True)


def test_answers_of_another_model_are_a_warning() -> None:
    assert judge_manifest(manifest_like(on_policy=False, target_fingerprint="d" * 64), EXPECTED).status == "warn"


DEMO = "run: {{root: {root}}}\ntarget: {{mask_token: '<|mask|>'}}\ndata: {{num_conversations: 4}}\n"
HUGE = """
target:
  path: some-org/Some-Model
  mask_token_id: 248070
  expected: {hidden_size: 5120, num_hidden_layers: 64, vocab_size: 248320, num_parameters: 26_900_000_000}
drafter:
  hidden_size: 5120
  intermediate_size: 17408
  num_hidden_layers: 5
  num_attention_heads: 32
  num_key_value_heads: 8
  head_dim: 128
  block_size: 16
  target_layer_ids: [1, 16, 31, 46, 61]
  layer_types: [sliding_attention, sliding_attention, sliding_attention, sliding_attention, full_attention]
  sliding_window: 2048
data: {source: files, files: ['s3://bucket/key']}
"""


def by_name(report: DoctorReport) -> dict[str, CheckResult]:
    return {result.name: result for result in report.results}


def test_the_demo_passes_its_first_examination(tmp_path: Path) -> None:
    config = parse_config(DEMO.format(root=tmp_path / "runs"), origin="test")
    report = examine(config, parts=("start",), paths=None, overfit_limit_s=1.0)
    found = by_name(report)
    assert not report.failures
    assert list(found) == [
        "devices", "target", "rope", "inputs", "memory", "disk", "storage", "clock", "ports", "attention", "leak test", "taps",
        "mask token", "vocabulary",
    ]  # fmt: skip
    assert found["taps"].status == found["vocabulary"].status == "ok"
    require_passed(report)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_looked_at_without_the_weights_is_said(tmp_path: Path) -> None:
    config = parse_config(HUGE, origin="test", overrides=[f"run.root={tmp_path}", "checkpoint.keep_clean=1"])
    report = examine(config, parts=("start", "data"), paths=None, overfit_limit_s=1.0)
    found = by_name(report)
    for name in ("taps", "mask token", "vocabulary", "data set", "labels", "overfit"):
        assert found[name].status == "skip"
        assert "not on this machine" in found[name].message
    assert found["leak test"].status == "ok"
    assert "narrow twin" in found["leak test"].message


def test_without_a_data_set_the_labels_are_checked_on_prompts_answered_on_the_spot(tmp_path: Path) -> None:
    config = parse_config(DEMO.format(root=tmp_path / "runs"), origin="test", overrides=["drafter.initializer_range=0.12"])
    found = by_name(examine(config, parts=("data",), paths=None, overfit_limit_s=30.0))
    assert {name: result.status for name, result in found.items()} == {"data set": "skip", "labels": "ok", "overfit": "ok"}


def test_a_source_without_a_usable_prompt_is_a_failure_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "nothing is asked here, it is plain text"}\n')
    config = parse_config(
        DEMO.format(root=tmp_path / "runs"), origin="test", overrides=["data.source=files", f"data.files=[{tmp_path}/text.jsonl]"]
    )
    found = by_name(examine(config, parts=("data",), paths=None, overfit_limit_s=1.0))
    assert found["labels"].status == "fail"
    assert "gives a prompt that the target answers" in found["labels"].message


def test_prompts_and_answers_become_one_padded_batch() -> None:
    batch = collated([([5, 6], [7, 8, 9]), ([1], [2])])
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9], [1, 2, 0, 0, 0]]
    assert batch.loss_mask.tolist() == [[False, False, True, True, True], [False, True, False, False, False]]
    assert batch.lengths.tolist() == [5, 2]


def test_a_wrong_mask_token_and_a_broken_target_fail_the_examination(tmp_path: Path) -> None:
    base = DEMO.format(root=tmp_path / "runs")
    config = parse_config(base, origin="test", overrides=["target.mask_token=null", "target.mask_token_id=0"])
    report = examine(config, parts=("start",), paths=None, overfit_limit_s=1.0)
    assert "mask token" in {failure.name for failure in report.failures}
    with pytest.raises(PreflightError, match="1 of 14 checks failed: mask token: "):
        require_passed(report)
    config = parse_config(base, origin="test", overrides=[f"target.path={tmp_path}"])
    found = by_name(examine(config, parts=("start",), paths=None, overfit_limit_s=1.0))
    assert found["target"].status == "fail"
    assert found["taps"].status == "skip"
    assert "mend what failed above" in found["taps"].message


def test_a_library_that_fails_inside_a_check_is_that_checks_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> CheckResult:
        raise NotImplementedError("no kernel for this GPU\nand a long story")

    monkeypatch.setattr("dflash.train.doctor.examination.attention_check", broken)
    config = parse_config(DEMO.format(root=tmp_path / "runs"), origin="test")
    found = by_name(examine(config, parts=("start",), paths=None, overfit_limit_s=1.0))
    assert found["attention"].status == "fail"
    assert found["attention"].message == "NotImplementedError: no kernel for this GPU"
    assert found["leak test"].status == "ok"


def test_a_check_that_runs_out_of_memory_is_skipped_not_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object, **__: object) -> CheckResult:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("dflash.train.doctor.examination.leak_check", too_large)
    config = parse_config(DEMO.format(root=tmp_path / "runs"), origin="test")
    found = by_name(examine(config, parts=("start",), paths=None, overfit_limit_s=1.0))
    assert found["leak test"].status == "skip"
    assert found["taps"].status == "ok"


def test_the_table_fits_80_columns_and_tells_the_remedy_once() -> None:
    long = "a rather long message about something that went wrong in this place " * 3
    results = (CheckResult("a check", "fail", long, "do this and " + long), CheckResult("b", "ok", "fine", ""))
    text = DoctorReport(results, 1.0).text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert text.count("->") == 1
    assert "1 ok, 1 fail; 1.0 s" in text
    assert " ".join(render_checks(results).split()).count(" ".join(long.split())) == 2


def test_the_payload_is_plain_values() -> None:
    report = DoctorReport((CheckResult("a", "skip", "why", "how"),), 0.1234567)
    assert report.payload == {
        "passed": True,
        "seconds": 0.123,
        "checks": [{"name": "a", "status": "skip", "message": "why", "remedy": "how"}],
    }


def test_target_config_of_the_tests_is_valid(run: TinyRun) -> None:
    assert TargetConfig(path=run.config.target.path, mask_token_id=MASK_TOKEN_ID).location == run.config.target.path
