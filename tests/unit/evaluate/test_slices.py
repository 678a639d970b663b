from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from dflash.evaluate.bootstrap import resample_counts, resample_groups
from dflash.evaluate.metrics import VerificationTable, verification_table
from dflash.evaluate.slices import MIN_PROMPTS, alarms, bigram_accuracy, bin_edges, context_bins, slice_by_context, slice_by_label

PROMPTS = 10
COUNTS = resample_counts(PROMPTS, samples=300, seed=1)


def test_context_bins_double_and_agree_with_their_edges() -> None:
    lengths = np.array([1, 31, 32, 63, 64, 127, 128, 255, 256, 5000])
    bins = context_bins(lengths)
    assert bins.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 8]
    for length, index in zip(lengths.tolist(), bins.tolist(), strict=True):
        low, high = bin_edges(index)
        assert low <= length < high


def test_slices_share_out_all_verifications() -> None:
    made = [(p, 20 + 30 * p, 3, (p + i) % 4, (p + i) % 4 + 1) for p in range(PROMPTS) for i in range(5)]
    table = verification_table(made)
    kinds = ["sorting" if p % 2 else "counting" for p in range(PROMPTS)]
    by_kind = slice_by_label(table, kinds, positions=3, counts=COUNTS, confidence=0.95)
    by_context = slice_by_context(table, positions=3, counts=COUNTS, confidence=0.95)
    for slices in (by_kind, by_context):
        assert sum(part["verifications"] for part in slices.values()) == len(table)
        assert sum(part["verification_frac"] for part in slices.values()) == pytest.approx(1.0)
        histograms = [part["acceptance_histogram"] for part in slices.values()]
        assert np.sum(histograms, axis=0).tolist() == np.bincount(table.accepted_counted, minlength=4).tolist()
    own = [counted for p, *_, counted in made if p % 2]
    assert by_kind["sorting"]["acceptance_length"] == pytest.approx(sum(own) / len(own))
    assert by_kind["sorting"]["prompts"] == 5
    assert list(by_context) == ["0-31", "32-63", "64-127", "128-255", "256-511"]


def test_a_kind_whose_answers_were_never_verified_has_no_slice() -> None:
    table = verification_table([(0, 10, 3, 1, 2)])
    slices = slice_by_label(table, ["a", "b"], positions=3, counts=resample_counts(2, samples=100, seed=0), confidence=0.9)
    assert set(slices) == {"a"}


def raised(table: VerificationTable, *, bigram_level: float = float("nan")) -> list[str]:
    return alarms(table, prompts=PROMPTS, counts=COUNTS, confidence=0.95, bigram_level=bigram_level, datasets=["toys"] * PROMPTS)


def by_length(accepted_near: int, accepted_far: int) -> VerificationTable:
    """Every prompt has verifications at short and at long contexts."""
    made = []
    for prompt in range(PROMPTS):
        made += [(prompt, 40, 7, accepted_near, accepted_near + 1)] * 10
        made += [(prompt, 400, 7, accepted_far, accepted_far + 1)] * 10
    return verification_table(made)


def test_never_accepting_a_draft_is_an_alarm() -> None:
    (alarm,) = raised(by_length(0, 0))
    assert "exactly 1.00" in alarm
    assert raised(by_length(3, 3)) == []


def test_a_prompt_set_that_is_stuck_at_one_does_not_hide_behind_the_others() -> None:
    rows = [(p, 40, 7, 0 if p % 2 else 3, 1 if p % 2 else 4) for p in range(PROMPTS) for _ in range(10)]
    datasets = ["humaneval" if p % 2 else "gsm8k" for p in range(PROMPTS)]
    (alarm,) = alarms(
        verification_table(rows), prompts=PROMPTS, counts=COUNTS, confidence=0.95, bigram_level=float("nan"), datasets=datasets
    )
    assert "exactly 1.00 on humaneval: no draft" in alarm
    few = [row for row in rows if row[0] not in {3, 5, 7, 9}]  # 10 verifications of humaneval prove nothing
    assert not alarms(
        verification_table(few), prompts=PROMPTS, counts=COUNTS, confidence=0.95, bigram_level=float("nan"), datasets=datasets
    )


def test_prompts_without_a_label_are_a_slice_of_their_own_unless_there_are_no_labels() -> None:
    table = verification_table([(p, 40, 3, 1, 2) for p in range(4)])
    counts = resample_counts(4, samples=100, seed=0)
    parts = slice_by_label(table, ["en", None, "de", "en"], positions=3, counts=counts, confidence=0.95)
    assert {name: part["prompts"] for name, part in parts.items()} == {"de": 1, "en": 2, "unknown": 1}
    assert slice_by_label(table, [None] * 4, positions=3, counts=counts, confidence=0.95) == {}
    assert parts["en"]["acceptance_ci"] == [2.0, 2.0] and parts["de"]["acceptance_ci"] == [None, None], "one prompt, no interval"
    assert parts["en"]["reached_per_position"] == [2, 2, 0] and parts["en"]["accepted_per_position"] == [2, 0, 0]
    assert parts["en"]["conditional_per_position"] == [1.0, 0.0, 0.0]


def test_acceptance_that_falls_with_context_length_is_an_alarm() -> None:
    (alarm,) = raised(by_length(5, 1))
    assert "falls with context length: at 256-511 tokens" in alarm
    assert raised(by_length(1, 5)) == []
    assert raised(by_length(5, 5)) == []


def test_the_turns_of_one_conversation_raise_no_alarm_about_context_length() -> None:
    def found(conversations: int) -> list[str]:
        counts = resample_groups([prompt % conversations for prompt in range(PROMPTS)], samples=300, seed=1)
        return alarms(
            by_length(5, 1), prompts=PROMPTS, counts=counts, confidence=0.95, bigram_level=float("nan"), datasets=["toys"] * PROMPTS
        )

    assert (found(MIN_PROMPTS - 1), len(found(MIN_PROMPTS))) == ([], 1)


def test_few_verifications_at_long_contexts_are_not_judged() -> None:
    table = by_length(5, 5)
    few = verification_table([(p, 900, 7, 0, 1) for p in range(PROMPTS)])
    joined = VerificationTable(
        *(
            np.concatenate([getattr(table, name), getattr(few, name)])
            for name in ("prompt", "context_tokens", "drafted", "accepted", "counted")
        )
    )
    assert raised(joined) == []


def test_a_first_position_below_the_bigram_level_is_an_alarm() -> None:
    table = by_length(3, 3)
    assert raised(table, bigram_level=0.9) == []
    poor = verification_table([(p, 40, 7, int(i == 0), 1 + int(i == 0)) for p in range(PROMPTS) for i in range(5)])
    (alarm,) = raised(poor, bigram_level=0.5)
    assert "bigram" in alarm


def brute_bigram(answers: list[list[int]]) -> float:
    right = total = 0
    for index, answer in enumerate(answers):
        others = [pair for other, text in enumerate(answers) if other != index for pair in pairwise(text)]
        for previous, following in pairwise(answer):
            seen = [word for before, word in others if before == previous]
            guess = max(sorted(set(seen)), key=seen.count) if seen else None
            right += guess == following
            total += 1
    return right / total


def test_bigram_accuracy_guesses_from_the_other_answers_only() -> None:
    generator = np.random.default_rng(0)
    answers = [generator.integers(0, 4, size=size).tolist() for size in (9, 1, 14, 6)]
    assert bigram_accuracy(answers) == pytest.approx(brute_bigram(answers))
    # Its own answer would predict itself perfectly; no other answer helps.
    assert bigram_accuracy([[1, 2, 3], [4, 5, 6]]) == 0.0
    assert math.isnan(bigram_accuracy([[1], []]))
