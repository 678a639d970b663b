"""Who began it: a gradient outlier dates what follows it, and one beyond all chance does so from further away."""

from __future__ import annotations

import pytest

from dflash.health.context import EXPLOSION_LEAD_STEPS, EXPLOSION_Z, GRAD_LEAD_STEPS, RecentStep, RunContext

ONSET = 100


def context_with(outliers: dict[int, float]) -> RunContext:
    return RunContext(recent=[RecentStep(step, (step,), outliers.get(step, 0.5)) for step in range(50, 130)])


@pytest.mark.parametrize(
    ("outliers", "dated"),
    [
        ({}, ONSET),
        ({ONSET - GRAD_LEAD_STEPS: 5.0}, ONSET - GRAD_LEAD_STEPS),
        ({ONSET - GRAD_LEAD_STEPS - 1: 5.0}, ONSET),
        ({ONSET - EXPLOSION_LEAD_STEPS: EXPLOSION_Z + 1}, ONSET - EXPLOSION_LEAD_STEPS),
        ({ONSET - EXPLOSION_LEAD_STEPS: EXPLOSION_Z}, ONSET),
        ({ONSET - EXPLOSION_LEAD_STEPS - 1: 99.0}, ONSET),
        ({ONSET + 1: 99.0}, ONSET),
        ({ONSET - 8: 60.0, ONSET - 1: 5.0}, ONSET - 8),
    ],
)
def test_an_onset_is_dated_back_to_the_outlier_that_led_it(outliers: dict[int, float], dated: int) -> None:
    assert context_with(outliers).led_from(ONSET, 4.0, step=129) == dated
