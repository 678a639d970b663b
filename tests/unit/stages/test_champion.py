"""The champion's place: taken only by an interval above zero on the same prompts, whatever the figures look like."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dflash.config import EvaluateConfig
from dflash.records import ProbeFigures, RegisteredEvidence
from dflash.stages.champion import rule

EVALUATE = EvaluateConfig(bootstrap_samples=400)


def evidence(lengths: np.ndarray, *, drafter: str = "new", target: str = "t", prompts: str = "p") -> RegisteredEvidence:
    """A drafter with these acceptance lengths, twenty verifications a prompt."""
    passes = np.full(lengths.size, 20)
    counted = np.round(lengths * passes).astype(int)
    length = float(counted.sum() / passes.sum())
    figures = ProbeFigures(length, (length, length), tuple(counted.tolist()), tuple(passes.tolist()), (), 0.0)
    return RegisteredEvidence("run-001", 10, 0, drafter, target, prompts, figures)


def base(prompts: int = 16) -> np.ndarray:
    return 1.5 + 2 * np.random.default_rng(0).random(prompts)


def ruled(challenger: RegisteredEvidence, champion: RegisteredEvidence | None, *, min_prompts: int = 8) -> tuple[bool, str]:
    ruling = rule(challenger, champion, evaluate=EVALUATE, min_prompts=min_prompts)
    assert (ruling.gain is None) == ("difference" not in ruling.reason)
    return ruling.moves, ruling.reason


def test_the_first_one_is_the_champion() -> None:
    assert ruled(evidence(base()), None) == (True, "there was no champion")


def test_a_gain_on_every_prompt_moves_the_alias_although_the_two_intervals_overlap() -> None:
    moves, reason = ruled(evidence(base() + 0.1), evidence(base(), drafter="old"))
    assert moves
    assert reason.startswith("better: acceptance length ")
    assert "on 16 prompts" in reason


def test_a_higher_mean_alone_does_not_move_it() -> None:
    noisy = base() + np.where(np.arange(16) == 3, 1.5, -0.05)
    challenger, champion = evidence(noisy), evidence(base(), drafter="old")
    assert challenger.figures.acceptance_length > champion.figures.acceptance_length
    moves, reason = ruled(challenger, champion)
    assert not moves
    assert reason.startswith("no difference shown: ")


def test_one_verified_prompt_of_many_moves_nothing() -> None:
    lengths = np.where(np.arange(16) == 3, 1.5, 0.0)
    silent = evidence(lengths), evidence(2 * lengths, drafter="old")
    one, other = (
        replace(each, figures=replace(each.figures, verifications=tuple(map(int, np.where(lengths, 20, 0))))) for each in silent
    )
    assert ruled(other, one) == (False, "not compared: of 16 prompts both verified fewer than two")


def test_a_worse_one_is_called_worse() -> None:
    moves, reason = ruled(evidence(base() - 0.2), evidence(base(), drafter="old"))
    assert not moves
    assert reason.startswith("worse: ")


@pytest.mark.parametrize(
    ("champion", "word"),
    [
        (evidence(base(), drafter="new"), "itself"),
        (evidence(base(), drafter="old", target="another"), "another target"),
        (evidence(base(), drafter="old", prompts="others"), "other prompts or settings"),
    ],
)
def test_what_cannot_be_compared_never_moves_it_however_good(champion: RegisteredEvidence, word: str) -> None:
    moves, reason = ruled(evidence(base() + 1), champion)
    assert not moves
    assert word in reason


def test_few_prompts_prove_nothing() -> None:
    moves, reason = ruled(evidence(base(7) + 1), evidence(base(7), drafter="old"))
    assert not moves
    assert reason == "not compared: 7 prompts, fewer than 8"
    assert ruled(evidence(base(7) + 1), evidence(base(7), drafter="old"), min_prompts=7)[0]
