"""Baselines and small statistics against naive recomputation."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.health.baseline import REFRESH_POINTS, Baseline
from dflash.health.trend import binomial_tail, mann_kendall_decline_p, percentile, theil_sen

POINTS = st.lists(st.tuples(st.floats(-5, 5, allow_subnormal=False), st.integers(1, 900)), min_size=1, max_size=90)


def make() -> Baseline:
    return Baseline(capacity=16, min_points=5, newest=6, floor=0.08, winsor_z=6.0)


class NaiveBaseline:
    """The same definition written down as directly as possible, with numpy."""

    def __init__(self) -> None:
        self.held: list[tuple[float, float]] = []
        self.medians: list[float] = []
        self.stands: tuple[float, float, float] | None = None
        self.since = 0

    def level(self) -> tuple[float, float, float] | None:
        return self.stands

    def spread(self, count: float) -> float:
        assert self.stands is not None
        _, scale, usual = self.stands
        return float(max(scale * math.sqrt(usual / count), 0.08))

    def accept(self, value: float, count: float) -> None:
        if self.stands is not None:
            value = min(value, self.stands[0] + 6.0 * self.spread(count))
        self.held = [*self.held, (value, count)][-16:]
        self.since += 1
        if len(self.held) >= 5 and (self.stands is None or self.since >= REFRESH_POINTS):
            values = np.array([value for value, _ in self.held])
            scale = max(1.4826 / math.sqrt(2) * np.median(np.abs(np.diff(values))), 0.08)
            self.stands = (float(np.median(values[-6:])), float(scale), float(np.median([count for _, count in self.held])))
            self.medians = [*self.medians, self.stands[0]][-5:]
            self.since = 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(points=POINTS)
def test_the_level_is_the_textbook_one(points: list[tuple[float, int]]) -> None:
    baseline, naive = make(), NaiveBaseline()
    for value, count in points:
        level, expected = baseline.level, naive.level()
        if expected is None:
            assert level is None
        else:
            assert level is not None
            assert (level.median, level.scale, level.count) == pytest.approx(expected, rel=1e-12, abs=1e-15)
            assert level.lowest == pytest.approx(min(naive.medians), rel=1e-12, abs=1e-15)
            assert level.z(value, count) == pytest.approx((value - expected[0]) / naive.spread(count), rel=1e-9, abs=1e-12)
        baseline.accept(value, count)
        naive.accept(value, count)
        assert len(baseline) == len(naive.held)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(points=POINTS, cut=st.integers(0, 90))
def test_a_restored_baseline_goes_on_exactly(points: list[tuple[float, int]], cut: int) -> None:
    straight, interrupted = make(), make()
    for index, (value, count) in enumerate(points):
        if index == cut:
            interrupted = Baseline.from_state(json.loads(json.dumps(interrupted.state())))
        straight.accept(value, count)
        interrupted.accept(value, count)
    assert interrupted.state() == straight.state()
    assert interrupted.level == straight.level


def test_one_explosion_does_not_teach_the_baseline() -> None:
    baseline = make()
    for index in range(16):
        baseline.accept(0.01 * (index % 4), 100)
    before = baseline.level
    baseline.accept(1e9, 100)
    after = baseline.level
    assert before is not None
    assert after is not None
    assert after.median == pytest.approx(before.median, abs=0.02)
    assert after.scale < 1.5 * before.scale
    assert max(baseline.state()["values"]) == pytest.approx(before.median + 6 * before.scale)


def test_a_point_of_few_samples_is_given_more_room_and_one_of_many_never_less_than_the_floor() -> None:
    baseline = make()
    for _ in range(8):
        baseline.accept(1.0, 400)
    level = baseline.level
    assert level is not None
    assert level.scale_for(100) == pytest.approx(2 * 0.08)
    assert level.scale_for(40_000) == pytest.approx(0.08)
    assert level.z(1.8, 4) < 1.01
    assert level.z(1.8, 400) == pytest.approx(10)


def test_a_falling_trend_is_not_taken_for_noise() -> None:
    rng = np.random.default_rng(0)
    still, falling = (Baseline(capacity=64, min_points=24, newest=16, floor=0.01, winsor_z=6.0) for _ in range(2))
    for index in range(64):
        noise = 0.1 * float(rng.standard_normal())
        still.accept(noise, 1)
        falling.accept(noise - 1.2 * index / 64, 1)
    flat, steep = still.level, falling.level
    assert flat is not None
    assert steep is not None
    assert flat.scale == pytest.approx(0.1, rel=0.35)
    assert steep.scale == pytest.approx(flat.scale, rel=0.15)
    assert steep.median == pytest.approx(-1.2, abs=0.25)


@pytest.mark.parametrize("values", [[5, 4, 3, 2, 1], [1, 3, 2, 5, 4], [4, 4, 2, 1, 3], [2, 2, 2, 2, 2], [1, 2, 3, 4, 5]])
def test_the_decline_p_value_is_near_the_exact_one(values: list[float]) -> None:
    def score(order: tuple[float, ...]) -> int:
        return sum(int(np.sign(b - a)) for a, b in itertools.combinations(order, 2))

    seen = score(tuple(values))
    orders = list(itertools.permutations(values))
    exact = sum(score(order) <= seen for order in orders) / len(orders)
    assert mann_kendall_decline_p(values) == pytest.approx(exact, abs=0.12) or seen >= 0


def test_noise_without_trend_is_rarely_a_decline() -> None:
    rng = np.random.default_rng(0)
    ps = [mann_kendall_decline_p(list(rng.standard_normal(32))) for _ in range(300)]
    assert sum(p < 0.05 for p in ps) <= 30
    assert mann_kendall_decline_p([300 - i + float(rng.standard_normal()) for i in range(32)]) < 1e-6


def test_theil_sen_is_the_median_of_all_slopes() -> None:
    values = [3.0, 2.5, 2.7, 1.0, 0.9, 90.0]
    slopes = [(values[j] - values[i]) / (j - i) for i in range(6) for j in range(i + 1, 6)]
    slope, last = theil_sen(values)
    assert slope == pytest.approx(float(np.median(slopes)))
    assert last == pytest.approx(float(np.median([v - slope * i for i, v in enumerate(values)])) + 5 * slope)


@pytest.mark.parametrize(("successes", "trials", "rate"), [(0, 5, 0.3), (3, 6, 0.2), (6, 6, 0.5)])
def test_the_binomial_tail_counts_outcomes(successes: int, trials: int, rate: float) -> None:
    exact = sum(
        math.prod(rate if hit else 1 - rate for hit in outcome)
        for outcome in itertools.product((0, 1), repeat=trials)
        if sum(outcome) >= successes
    )
    assert binomial_tail(successes, trials, rate) == pytest.approx(exact)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0, 100))
def test_the_percentile_is_that_of_numpy(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == np.percentile(values, percent)


def test_ties_are_counted_in_the_variance_of_a_trend() -> None:
    # Kendall 1975: s = -5 of 6 pairs, one tie of two values: the variance is (4*3*13 - 2*1*9) / 18.
    assert mann_kendall_decline_p([4.0, 3.0, 3.0, 1.0]) == pytest.approx(0.5 * math.erfc(4 / math.sqrt(2 * (156 - 18) / 18)))
