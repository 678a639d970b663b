"""The ratio that the comparison with other trainers gives."""

from __future__ import annotations

import pytest

from benchmarks.equal_budget import gain_over
from dflash.config import EvaluateConfig
from dflash.records import ProbeFigures


def probe(counted: tuple[int, ...], verifications: tuple[int, ...]) -> ProbeFigures:
    return ProbeFigures(sum(counted) / sum(verifications), (1.0, 1.0), counted, verifications, (), 0.0)


def test_seeds_are_pooled_and_the_interval_holds_the_ratio() -> None:
    new = [probe((40, 60, 30), (10, 20, 10)), probe((44, 50, 36), (10, 20, 10))]
    old = [probe((30, 40, 30), (10, 20, 10)), probe((20, 50, 30), (10, 20, 10))]
    low, middle, high = gain_over(new, old, evaluate=EvaluateConfig())
    assert middle == pytest.approx(260 / 200)
    assert low < middle < high


def test_the_same_drafters_gain_nothing() -> None:
    same = [probe((40, 60, 30), (10, 25, 9))]
    assert gain_over(same, same, evaluate=EvaluateConfig()) == (1.0, 1.0, 1.0)
