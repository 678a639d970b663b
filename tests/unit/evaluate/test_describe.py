"""An evaluation in words: warnings first, what was not measured is no zero, other people's names stay harmless."""

from __future__ import annotations

from typing import Any

from dflash.evaluate.describe import SLICE_HEADS, evaluation_text, facts, slice_rows
from dflash.evaluate.page import evaluation_page
from dflash.records import EvaluationResult, PromptSetEntry

PART = {"prompts": 5, "verifications": 40, "acceptance_length": 2.5, "acceptance_ci": [2.2, 2.8], "accepted_length": 1.5}


def result(**changes: Any) -> EvaluationResult:
    values: dict[str, Any] = {
        "drafter": "trained", "step": 600, "dataset": "gsm8k+mine", "prompts": 48, "block_size": 4, "temperature": 0.6,
        "template_flags": {"enable_thinking": False}, "verifications": 80, "drafted": 240, "accepted": 120,
        "committed_tokens": 200, "acceptance_length": 2.5, "acceptance_length_untruncated": 2.6, "accepted_length": 1.5,
        "acceptance_length_macro": 2.4, "acceptance_ci": (2.1, 2.9), "confidence": 0.95,
        "survival_per_position": (0.8, 0.5, 0.2), "conditional_per_position": (0.8, 0.6, 0.4),
        "acceptance_histogram": (16, 24, 24, 16), "slices": {"dataset": {"gsm8k": PART, "mine": PART | {"speedup": 1.8}}},
        "plain_s_per_token": 0.02, "speculative_s_per_token": 0.01, "speedup": 2.0, "speedup_ci": (1.9, 2.2), "lossless": True,
        "differing_prompts": 1, "near_tie_prompts": 1, "warnings": (), "batch_size": 8, "target_frac": 0.7, "drafter_frac": 0.2,
        "other_frac": 0.1, "prompt_sets": (PromptSetEntry("gsm8k", "openai/gsm8k@abc:test.parquet", "f" * 64, 24),),
    }  # fmt: skip
    return EvaluationResult(**{**values, **changes})


def test_the_text_says_what_was_measured_and_how() -> None:
    text = evaluation_text(result())
    for wanted in (
        "acceptance length 2.50 [2.10, 2.90]", "temperature 0.6, batch size 8", "2.00x (1.90 to 2.20): 50.0 -> 100.0 tokens/s",
        "both at batch size 8", "target 70%, drafter 20%, rest 10%", "yes: 1 of 48 answers differ from plain decoding, 1 of them",
        "24 prompts, openai/gsm8k@abc:test.parquet, SHA-256 ffffffffffffffff", "enable_thinking=False", "dataset mine", "1.80x",
    ):  # fmt: skip
        assert wanted in text
    assert "WARNING" not in text


def test_warnings_stand_in_front_of_every_figure_on_paper_and_page() -> None:
    warnings = ("not lossless: 3 of 48 answers differ", "acceptance length is exactly 1.00: no draft was ever accepted")
    text = evaluation_text(result(warnings=warnings)).splitlines()
    assert text[1:3] == [f"WARNING: {warning}" for warning in warnings]
    page = evaluation_page(result(warnings=warnings), {})
    assert f'<div class="box fault">{warnings[0]}' in page and f'<div class="box warning">{warnings[1]}' in page
    assert page.index(warnings[1]) < page.index("<table")


def test_what_was_not_measured_is_left_out_or_a_dash() -> None:
    unknown = dict.fromkeys(
        ("acceptance_ci", "acceptance_length_macro", "acceptance_length_untruncated", "accepted_length", "plain_s_per_token",
         "speculative_s_per_token", "speedup", "speedup_ci", "lossless", "differing_prompts", "near_tie_prompts", "target_frac")
    )  # fmt: skip
    found = dict(facts(result(**unknown)))
    assert not {"speed-up", "time split", "lossless"} & set(found)
    text = evaluation_text(result(**unknown))
    assert "no interval" in text and "None" not in text
    rows = slice_rows(result(slices={"domain": {"math": {"acceptance_length": 2.0}, "code": PART}}))
    assert [len(row) for row in rows] == [len(SLICE_HEADS)] * 2 and rows[0][0] == "domain math"
    assert rows[0].count("-") == len(SLICE_HEADS) - 2


def test_a_label_that_all_prompts_share_makes_no_row() -> None:
    assert slice_rows(result(slices={"dataset": {"gsm8k": PART}, "turn": {"1": PART}})) == []
    assert "<h2>By slice" not in evaluation_page(result(slices={}), {})


def test_names_of_others_can_neither_forge_a_line_nor_a_tag() -> None:
    hostile = "<script>x\x1b[2J\nlossless yes"
    changes = {"dataset": hostile, "warnings": (hostile,), "slices": {"kind": {hostile: PART, "b": PART}}}
    page = evaluation_page(result(**changes), {"a<b>.png": b"png"})
    assert "<script>" not in page and "&lt;script&gt;" in page and "a<b>" not in page
    text = evaluation_text(result(**changes))
    assert "\x1b" not in text and not any(line.startswith("lossless yes") for line in text.splitlines())
