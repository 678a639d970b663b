from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from dflash.evaluate.bootstrap import (
    drawn_apart,
    interval_over,
    percentile_interval,
    ratio_interval,
    resample_counts,
    resample_groups,
    resampled_ratios,
    student_quantile,
    widened,
)


def test_every_resample_draws_as_many_prompts_as_there_are() -> None:
    counts = resample_counts(7, samples=50, seed=1)
    assert counts.shape == (50, 7)
    assert (counts.sum(axis=1) == 7).all()
    assert (counts == resample_counts(7, samples=50, seed=1)).all()
    assert (counts != resample_counts(7, samples=50, seed=2)).any()


def test_the_vectorised_ratio_equals_drawing_prompts_one_by_one() -> None:
    tokens, passes = [9, 4, 30, 1], [3, 4, 6, 1]
    counts = resample_counts(4, samples=20, seed=3)
    for row, ratio in zip(counts, resampled_ratios(tokens, passes, counts=counts), strict=True):
        drawn = [prompt for prompt, times in enumerate(row) for _ in range(times)]
        assert ratio == pytest.approx(sum(tokens[p] for p in drawn) / sum(passes[p] for p in drawn))


def test_a_resample_without_any_verification_is_left_out() -> None:
    counts = np.array([[2, 0], [0, 2]])
    ratios = resampled_ratios([0, 6], [0, 2], counts=counts)
    assert np.isnan(ratios[0]) and ratios[1] == 3.0
    assert percentile_interval(ratios, confidence=0.9) == (3.0, 3.0)
    assert all(np.isnan(end) for end in percentile_interval([float("nan")], confidence=0.9))


def test_one_prompt_with_something_to_say_has_no_interval_however_many_are_silent() -> None:
    counts = resample_counts(3, samples=100, seed=0)
    assert ratio_interval([0, 6, 0], [0, 2, 0], counts=counts, confidence=0.95) is None
    assert ratio_interval([4, 6, 0], [2, 2, 0], counts=counts, confidence=0.95) == (2.0, 3.0)
    assert interval_over([float("nan")], prompts=9, confidence=0.95) is None


def test_equal_prompts_leave_no_doubt_and_a_higher_confidence_is_wider() -> None:
    counts = resample_counts(5, samples=200, seed=0)
    assert ratio_interval([6] * 5, [2] * 5, counts=counts, confidence=0.95) == (3.0, 3.0)
    narrow = ratio_interval([2, 5, 9, 4, 4], [2, 2, 2, 2, 2], counts=counts, confidence=0.5)
    wide = ratio_interval([2, 5, 9, 4, 4], [2, 2, 2, 2, 2], counts=counts, confidence=0.99)
    assert wide and narrow and wide[0] < narrow[0] < narrow[1] < wide[1]


def test_prompts_of_one_group_are_drawn_together_and_are_one() -> None:
    counts = resample_groups(["a", "b", "a", "c"], samples=100, seed=4)
    assert (counts[:, 0] == counts[:, 2]).all()
    assert (counts[:, [0, 1, 3]] == resample_counts(3, samples=100, seed=4)).all()
    assert drawn_apart(counts, [True] * 4) == 3 and drawn_apart(counts, [True, False, True, False]) == 1
    assert ratio_interval([4, 0, 9, 0], [2, 0, 3, 0], counts=counts, confidence=0.9) is None, "two turns of one conversation"
    alone = resample_groups(range(5), samples=100, seed=4)
    assert (alone == resample_counts(5, samples=100, seed=4)).all() and drawn_apart(alone, np.ones(5)) == 5


ANSWER_TOKENS, DRAFTS = 64, 7


def simulated_passes(rates: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.int64]:
    """Verifications of answers of 64 tokens, one a prompt: every draft is accepted with the prompt's own chance."""
    rates = rates[..., None]
    # Accepted drafts of a block of 7: how often a coin of that chance falls right in a row.
    accepted = np.floor(np.log(generator.random((*rates.shape[:-1], ANSWER_TOKENS))) / np.log(rates)).clip(0, DRAFTS)
    before = np.cumsum(accepted + 1, axis=-1) - (accepted + 1)
    return (before < ANSWER_TOKENS).sum(axis=-1)


@pytest.mark.parametrize("prompts", [16, 48])
def test_the_interval_covers_the_truth_as_often_as_it_says(prompts: int) -> None:
    """500 simulated evaluations; prompts differ in how predictable they are, and verifications of a prompt share that."""
    generator = np.random.default_rng(5)
    truth = ANSWER_TOKENS / simulated_passes(generator.beta(2, 2, size=40_000), generator).mean()
    passes = simulated_passes(generator.beta(2, 2, size=(500, prompts)), generator)
    counts = resample_counts(prompts, samples=1000, seed=9)
    tokens = np.full(prompts, ANSWER_TOKENS)
    intervals = [ratio_interval(tokens, each, counts=counts, confidence=0.95) for each in passes]
    covered = float(np.mean([low <= truth <= high for low, high in intervals]))
    assert 0.93 <= covered <= 0.97


def test_turns_of_one_conversation_are_no_evidence_of_their_own() -> None:
    """500 simulated evaluations of 24 conversations of two turns that share how predictable they are."""
    generator = np.random.default_rng(8)
    truth = ANSWER_TOKENS / simulated_passes(generator.beta(2, 2, size=40_000), generator).mean()
    passes = simulated_passes(np.repeat(generator.beta(2, 2, size=(500, 24)), 2, axis=1), generator)
    tokens = np.full(48, ANSWER_TOKENS)

    def covered(groups: list[int]) -> float:
        counts = resample_groups(groups, samples=1000, seed=9)
        intervals = [ratio_interval(tokens, each, counts=counts, confidence=0.95) for each in passes]
        return float(np.mean([low <= truth <= high for low, high in intervals]))

    assert 0.93 <= covered([prompt // 2 for prompt in range(48)]) <= 0.97
    assert covered(list(range(48))) < 0.9, "the control: drawn one by one they promise too much"


def test_plain_percentiles_of_few_prompts_would_promise_too_much() -> None:
    """The control of the test above: without the wider level the intervals of 8 prompts miss twice as often as they say."""
    generator = np.random.default_rng(6)
    truth = ANSWER_TOKENS / simulated_passes(generator.beta(2, 2, size=40_000), generator).mean()
    passes = simulated_passes(generator.beta(2, 2, size=(500, 8)), generator)
    counts = resample_counts(8, samples=1000, seed=9)
    tokens = np.full(8, ANSWER_TOKENS)
    missed = {"plain": 0, "wide": 0}
    for each in passes:
        plain = percentile_interval(resampled_ratios(tokens, each, counts=counts), confidence=0.95)
        for name, (low, high) in (("plain", plain), ("wide", ratio_interval(tokens, each, counts=counts, confidence=0.95))):
            missed[name] += not low <= truth <= high
    assert missed["plain"] > 40 and missed["wide"] < 40


@pytest.mark.parametrize(
    ("degrees", "wanted"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (5, 2.57058), (10, 2.22814), (30, 2.04227), (1000, 1.96234)]
)
def test_quantiles_of_students_t_are_those_of_the_tables(degrees: int, wanted: float) -> None:
    assert student_quantile(0.975, degrees=degrees) == pytest.approx(wanted, rel=2e-3)
    assert student_quantile(0.025, degrees=degrees) == pytest.approx(-wanted, rel=2e-3)


def test_the_level_rises_for_few_prompts_and_is_the_asked_one_for_many() -> None:
    levels = [widened(0.95, prompts=prompts) for prompts in (2, 3, 8, 30, 1000)]
    assert levels == sorted(levels, reverse=True)
    assert levels[0] <= 1.0 and levels[-1] == pytest.approx(0.95, abs=1e-3)
    assert widened(0.95, prompts=1) == widened(0.95, prompts=0) == 0.95
