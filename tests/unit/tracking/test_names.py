"""Metric names and values, and what never leaves the machine."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.records import EvaluationResult
from dflash.tracking import evaluation_metrics, redact_text, step_metrics
from dflash.tracking.redact import REDACTED, redact_params
from tests.unit.tracking.tracking_fakes import step_record


def test_every_number_of_a_step_becomes_a_metric() -> None:
    metrics = step_metrics(step_record(7, ce=2.5))
    assert metrics["train/loss"] == 2.5
    assert metrics["train/accepted_length"] == 1.5
    assert metrics["train/lr"] == 1e-3
    assert metrics["train/skipped"] == 0.0


def test_a_loss_that_was_not_finite_is_left_out_and_the_skip_is_told() -> None:
    metrics = step_metrics(step_record(7, ce=None))
    assert "train/loss" not in metrics
    assert not any(name.startswith("train/bucket_loss") for name in metrics)
    assert metrics["train/skipped"] == 1.0


def test_a_bucket_that_comes_twice_in_a_step_is_pooled_by_tokens() -> None:
    record = step_record(0)
    record["micro_batches"] = [
        {"bucket": 4, "ce_sum": 30.0, "n_tokens": 10},
        {"bucket": 4, "ce_sum": 10.0, "n_tokens": 30},
        {"bucket": 1, "ce_sum": 5.0, "n_tokens": 5},
        {"bucket": 2, "ce_sum": 0.0, "n_tokens": 0},
    ]
    metrics = step_metrics(record)
    assert metrics["train/bucket_loss/4"] == pytest.approx(1.0)
    assert metrics["train/bucket_loss/1"] == pytest.approx(1.0)
    assert "train/bucket_loss/2" not in metrics


def evaluation(**changes: object) -> EvaluationResult:
    values = {
        "drafter": "trained", "step": 10, "dataset": "synthetic", "prompts": 2, "block_size": 3, "temperature": 0.0,
        "template_flags": {}, "verifications": 4, "drafted": 8, "accepted": 6, "committed_tokens": 10,
        "acceptance_length": 2.5, "acceptance_length_untruncated": 2.6, "accepted_length": 1.5,
        "acceptance_length_macro": 2.4, "acceptance_ci": (2.1, 2.9), "confidence": 0.95,
        "survival_per_position": (0.9, 0.6), "conditional_per_position": (0.9, 0.7), "acceptance_histogram": (1, 1, 2),
        "slices": {}, "plain_s_per_token": 0.02, "speculative_s_per_token": 0.01, "speedup": 2.0, "lossless": True,
        "differing_prompts": 0, "near_tie_prompts": 0, "warnings": (),
    }  # fmt: skip
    return EvaluationResult(**{**values, **changes})  # type: ignore[arg-type]


def test_an_evaluation_is_filed_under_its_drafter() -> None:
    metrics = evaluation_metrics(evaluation())
    assert metrics["eval/trained/acceptance_length"] == 2.5
    assert metrics["eval/trained/acceptance_ci_low"] == 2.1
    assert metrics["eval/trained/survival_at_2"] == 0.6
    assert metrics["eval/trained/conditional_at_2"] == 0.7
    assert metrics["eval/trained/speculative_tokens_per_s"] == 100.0
    assert metrics["eval/trained/lossless"] == 1.0 and metrics["eval/trained/differing_prompts"] == 0.0
    assert not any(name.startswith("eval/trained/speedup_ci") for name in metrics)
    untimed = evaluation_metrics(evaluation(drafter="untrained", speedup=None, lossless=False))
    assert "eval/untrained/speedup" not in untimed
    assert untimed["eval/untrained/lossless"] == 0.0


def test_several_prompt_sets_have_metrics_of_their_own() -> None:
    sets = {"gsm8k": {"acceptance_length": 2.0, "speedup": 1.5}, "humaneval": {"acceptance_length": 3.0}}
    metrics = evaluation_metrics(evaluation(slices={"dataset": sets}, speedup_ci=(1.8, 2.2), target_frac=0.8))
    assert metrics["eval/trained/gsm8k/speedup"] == 1.5 and metrics["eval/trained/humaneval/acceptance_length"] == 3.0
    assert "eval/trained/humaneval/speedup" not in metrics
    assert (metrics["eval/trained/speedup_ci_low"], metrics["eval/trained/target_frac"]) == (1.8, 0.8)
    one = evaluation_metrics(evaluation(slices={"dataset": {"gsm8k": sets["gsm8k"]}}))
    assert not any("gsm8k" in name for name in one)


WORDS = st.text(alphabet="abcdefghijklmnopqrstuvwxyz0123456789", min_size=1, max_size=12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    user=WORDS, secret=WORDS.map(lambda word: f"SECRET{word}"), host=WORDS, scheme=st.sampled_from(["https", "postgresql", "s3"])
)
def test_no_credential_in_an_address_survives(user: str, secret: str, host: str, scheme: str) -> None:
    addresses = [
        f"{scheme}://{user}:{secret}@{host}/db",
        f"{scheme}://{secret}@{host}/db",
        f"{scheme}://{user}:x/{secret}@{host}/db",
        f"{scheme}://{user}:x@{secret}@{host}/db",
        f"{scheme}://{user}:x'\"{secret}@{host}/db",
        f"{scheme}://{host}/object?X-Signature={secret}",
        f'["{scheme}://{user}:{secret}@{host}/a", "{scheme}://{host}/b?token={secret}"]',
    ]
    for address in addresses:
        cleaned = redact_text(f"before {address} after")
        assert secret not in cleaned
        assert host in cleaned
        assert cleaned.startswith("before ")


def test_keys_that_name_a_secret_are_hidden_and_ordinary_keys_are_not() -> None:
    params = {"data.template_flags.api_key": "x1", "a.password": "x2", "hub.access-token": "x3"}
    assert set(redact_params(params).values()) == {REDACTED}
    ordinary = {"target.mask_token": "<repo_name>", "plan.tokens_per_batch": "1024", "data.files": '["a?b.jsonl"]'}
    assert redact_params(ordinary) == ordinary
