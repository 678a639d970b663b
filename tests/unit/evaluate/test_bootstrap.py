from __future__ import annotations

import numpy as np
import pytest

from dflash.evaluate.bootstrap import percentile_interval, ratio_interval, resample_counts, resampled_ratios


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


def test_equal_prompts_leave_no_doubt_and_a_higher_confidence_is_wider() -> None:
    counts = resample_counts(5, samples=200, seed=0)
    assert ratio_interval([6] * 5, [2] * 5, counts=counts, confidence=0.95) == (3.0, 3.0)
    narrow = ratio_interval([2, 5, 9, 4, 4], [2, 2, 2, 2, 2], counts=counts, confidence=0.5)
    wide = ratio_interval([2, 5, 9, 4, 4], [2, 2, 2, 2, 2], counts=counts, confidence=0.99)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """Prompts differ in how predictable they are; verifications inside a prompt share that."""
    generator = np.random.default_rng(5)
    prompts, evaluations, covered = 48, 300, 0
    counts = resample_counts(prompts, samples=1000, seed=9)
    level = np.array([0.2, 0.5, 0.8])
    # The pooled truth weighs each kind by its verifications: 20 of them whatever the kind.
    truth = float((1 + level * 7).mean())
    for _ in range(evaluations):
        rate = generator.choice(level, size=prompts)
        tokens = 20 + generator.binomial(7 * 20, rate)
        low, high = ratio_interval(tokens, np.full(prompts, 20), counts=counts, confidence=0.95)
        covered += low <= truth <= high
    assert 0.91 <= covered / evaluations <= 0.98
