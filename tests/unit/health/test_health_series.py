"""A bare loss curve, such as other trainers log."""

from __future__ import annotations

import numpy as np
import pytest

from dflash.config import HealthConfig
from dflash.health import SeriesJudge, SeriesPoint
from dflash.records import Finding


def curve(*, steps: int, seed: int) -> list[SeriesPoint]:
    rng = np.random.default_rng(seed)
    losses = 2.0 + 10.0 * np.exp(-np.arange(steps) / 50) * np.exp(0.03 * rng.standard_normal(steps))
    norms = (10.0 + 70.0 * np.exp(-np.arange(steps) / 20)) * np.exp(0.1 * rng.standard_normal(steps))
    return [SeriesPoint(float(loss), float(norm), ()) for loss, norm in zip(losses, norms, strict=True)]


def judge_series(points: list[SeriesPoint], *, health: HealthConfig) -> list[Finding]:
    judge = SeriesJudge(health)
    for point in points:
        judge.feed(point)
    return judge.findings()


def test_a_clean_run_whose_gradient_falls_during_the_warm_up_is_silent() -> None:
    assert judge_series(curve(steps=600, seed=0), health=HealthConfig()) == []


def test_a_transient_is_found_at_its_record_and_not_acted_on() -> None:
    points = curve(steps=600, seed=1)
    points[400] = SeriesPoint(5.1, points[400].grad_norm, ())
    points[401] = SeriesPoint(3.8, points[401].grad_norm, ())
    (finding,) = judge_series(points, health=HealthConfig())
    assert (finding.detector, finding.severity, finding.first_step) == ("loss spike", "warn", 400)
    assert finding.values["resolved_step"] == 402


def test_an_all_nan_run_is_critical_at_its_first_record() -> None:
    points = [SeriesPoint(None, None, ("loss", "grad_norm")) for _ in range(100)]
    (finding,) = judge_series(points, health=HealthConfig())
    assert (finding.severity, finding.onset_step, finding.values["alarm_step"], finding.last_step) == ("critical", 0, 0, 99)


@pytest.mark.parametrize("missing", [SeriesPoint(None, None, ()), SeriesPoint(2.0, None, ())])
def test_a_missing_value_is_not_a_nan(missing: SeriesPoint) -> None:
    assert judge_series([*curve(steps=300, seed=2), *[missing] * 50], health=HealthConfig()) == []


def test_gradient_outliers_without_damage_are_warnings_that_settle() -> None:
    points = curve(steps=900, seed=3)
    for step in range(200, 860, 60):
        points[step] = SeriesPoint(points[step].loss, 170.0, ())
    findings = judge_series(points, health=HealthConfig())
    assert [f.first_step for f in findings] == list(range(200, 860, 60))
    assert {(f.detector, f.severity) for f in findings} == {("gradient spike", "warn")}
    assert all("resolved_step" in f.values for f in findings)
