from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.evaluate.bootstrap import resample_counts
from dflash.evaluate.metrics import VerificationTable, acceptance_metrics, verification_table

POSITIONS = 5


@st.composite
def rows(draw: st.DrawFn) -> list[tuple[int, int, int, int, int]]:
    made = []
    for _ in range(draw(st.integers(1, 12))):
        drafted = draw(st.integers(0, POSITIONS))
        accepted = draw(st.integers(0, drafted))
        counted = draw(st.integers(1, accepted + 1))
        made.append((draw(st.integers(0, 3)), draw(st.integers(1, 300)), drafted, accepted, counted))
    return made


def measured(table: VerificationTable, prompts: int = 4):
    counts = resample_counts(prompts, samples=100, seed=0)
    return acceptance_metrics(table, prompts=prompts, positions=POSITIONS, counts=counts, confidence=0.95)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows())
def test_every_figure_equals_its_definition(made: list[tuple[int, int, int, int, int]]) -> None:
    figures = measured(verification_table(made))
    n = len(made)
    assert figures.verifications == n
    assert figures.committed_tokens == sum(counted for *_, counted in made)
    assert figures.acceptance_length == pytest.approx(sum(counted for *_, counted in made) / n)
    assert figures.acceptance_length_untruncated == pytest.approx(sum(accepted + 1 for _, _, _, accepted, _ in made) / n)
    kept = [min(accepted, counted) for _, _, _, accepted, counted in made]
    assert figures.accepted == sum(kept)
    assert figures.acceptance_histogram == tuple(kept.count(value) for value in range(POSITIONS + 1))
    by_prompt = [[row[4] for row in made if row[0] == prompt] for prompt in range(4)]
    macro = [sum(part) / len(part) for part in by_prompt if part]
    assert figures.acceptance_length_macro == pytest.approx(sum(macro) / len(macro))
    for k in range(1, POSITIONS + 1):
        assert figures.survival_per_position[k - 1] == pytest.approx(sum(value >= k for value in kept) / n)
        judged = [
            min(accepted, counted) >= k
            for _, _, drafted, accepted, counted in made
            if drafted >= k and min(accepted, counted) >= k - 1 and not (counted <= accepted and k > counted)
        ]
        assert figures.conditional_per_position[k - 1] == pytest.approx(sum(judged) / len(judged) if judged else 0.0)
        assert figures.drafted_per_position[k - 1] == sum(drafted >= k for _, _, drafted, _, _ in made)
        assert figures.reached_per_position[k - 1] == len(judged)
        assert figures.accepted_per_position[k - 1] == sum(judged)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(rows())
def test_the_conventions_are_consistent(made: list[tuple[int, int, int, int, int]]) -> None:
    figures = measured(verification_table(made))
    assert sum(figures.survival_per_position) == pytest.approx(figures.accepted_length)
    assert figures.acceptance_length <= figures.acceptance_length_untruncated
    assert figures.accepted_length <= figures.acceptance_length <= figures.accepted_length + 1 + 1e-12
    assert sum(figures.acceptance_histogram) == figures.verifications
    assert sum(figures.accepted_per_position) == figures.accepted and sum(figures.drafted_per_position) == figures.drafted
    for drafted, reached, accepted in zip(
        figures.drafted_per_position, figures.reached_per_position, figures.accepted_per_position, strict=True
    ):
        assert accepted <= reached <= drafted <= figures.verifications
    assert list(figures.survival_per_position) == sorted(figures.survival_per_position, reverse=True)


def test_tokens_behind_a_stop_id_count_only_in_the_untruncated_convention() -> None:
    # Five drafts accepted, but the answer ends at the second; the reference would count six tokens.
    table = verification_table([(0, 10, 5, 5, 2), (0, 12, 5, 0, 1)])
    figures = measured(table)
    assert figures.acceptance_length == 1.5
    assert figures.acceptance_length_untruncated == 3.5
    assert figures.accepted == 2
    # Positions behind the stop were not judged: position 3 has no verification that reached it.
    assert figures.conditional_per_position == (0.5, 1.0, 0.0, 0.0, 0.0)


def test_a_known_acceptance_law_is_recovered_within_the_interval() -> None:
    """Each draft is accepted with probability 0.7 if all before it were: E[tokens] = (1 - 0.7^6) / 0.3."""
    generator = np.random.default_rng(2)
    chances = generator.random((4000, POSITIONS)) < 0.7
    accepted = np.cumprod(chances, axis=1).sum(axis=1)
    prompt = np.arange(4000) // 100
    table = VerificationTable(prompt, np.full(4000, 50), np.full(4000, POSITIONS), accepted, accepted + 1)
    figures = measured(table, prompts=40)
    truth = (1 - 0.7**6) / 0.3
    assert figures.acceptance_ci[0] < truth < figures.acceptance_ci[1]
    assert figures.acceptance_length == pytest.approx(truth, abs=0.1)
    assert figures.conditional_per_position == pytest.approx([0.7] * POSITIONS, abs=0.05)
    assert figures.survival_per_position == pytest.approx([0.7**k for k in range(1, 6)], abs=0.05)


def test_one_prompt_has_a_length_and_no_interval() -> None:
    figures = measured(verification_table([(1, 10, 5, 2, 3), (1, 13, 5, 0, 1)]), prompts=3)
    assert figures.acceptance_length == figures.acceptance_length_macro == 2.0 and figures.acceptance_ci is None


def test_pooled_weighs_verifications_and_macro_weighs_prompts() -> None:
    table = verification_table([(0, 10, 5, 4, 5), (1, 10, 5, 0, 1), (1, 11, 5, 0, 1), (1, 12, 5, 0, 1)])
    figures = measured(table, prompts=2)
    assert figures.acceptance_length == 2.0
    assert figures.acceptance_length_macro == 3.0
