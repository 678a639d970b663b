"""Queue decline: real losses of ground are seen; fillings, drains, saw-teeth and short queues are not."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from dflash.config import HealthConfig
from dflash.health.context import RunContext
from dflash.health.detectors.queues import QueueDecline
from dflash.health.panel import SPARSE_STEPS
from dflash.records import Finding
from tests.support.health_lines import feed, step_line

HEALTH = HealthConfig()


def findings(
    depth: Callable[[int], float],
    *,
    steps: int = 1500,
    total_steps: int | None = None,
    feature: Callable[[int], float] | None = None,
) -> list[Finding]:
    detector = QueueDecline(HEALTH)
    ahead = (lambda step: 20) if feature is None else feature
    lines = [
        step_line(step, ready_depth=max(0, round(depth(step))), feature_depth=max(0, round(ahead(step))), plan_position=step)
        for step in range(0, steps, SPARSE_STEPS)
    ]
    feed(detector, lines, context=RunContext(total_steps=total_steps))
    return detector.reported()


def noise(seed: int, height: float) -> Callable[[int], float]:
    values = height * np.random.default_rng(seed).standard_normal(5000)
    return lambda step: float(values[step])


@pytest.mark.parametrize(("first", "last"), [(400, 1200), (800, 1000), (200, 1400)])
def test_a_sinking_queue_is_seen(first: int, last: int) -> None:
    wobble = noise(1, 3)

    def depth(step: int) -> float:
        return 300 - 90 * min(1.0, max(0.0, (step - first) / (last - first))) + wobble(step)

    (finding,) = findings(depth)
    assert finding.values["queue"] == "ready"
    assert first - 20 <= finding.onset_step <= last
    assert finding.values["settled"] == pytest.approx(300, abs=8)
    assert finding.values["level"] == pytest.approx(210, abs=20)
    assert "resolved_step" not in finding.values


def test_the_feature_queue_is_judged_as_well() -> None:
    (finding,) = findings(lambda step: 200, feature=lambda step: 80 if step < 600 else max(10, 80 - (step - 600) / 5))
    assert finding.values["queue"] == "feature"


def test_a_decline_that_will_run_dry_is_seen_before_it_is_deep() -> None:
    def depth(step: int) -> float:
        return 300 - max(0, step - 600) / 20

    assert findings(depth, steps=1700) == []
    (finding,) = findings(depth, steps=1700, total_steps=9000)
    assert 1700 < finding.values["empty_step"] < 9000
    assert findings(depth, steps=1700, total_steps=3000) == []


@pytest.mark.parametrize(
    "depth",
    [
        lambda step: 300,
        lambda step: min(300, step / 3),
        lambda step: 300 - 60 * ((step % 100) / 100),
        lambda step: 300 - 40 * (step % 2),
        lambda step: 2 - (step > 900),
        lambda step: 0,
        lambda step: 40 + 40 * (step in range(500, 520)),
    ],
    ids=["full", "filling", "saw-tooth", "alternating", "short", "empty", "one peak"],
)
def test_what_is_no_decline_is_silent(depth: Callable[[int], float]) -> None:
    assert findings(depth, total_steps=1500) == []


@pytest.mark.parametrize("seed", range(6))
def test_noise_is_silent(seed: int) -> None:
    wobble = noise(seed, 25)
    assert findings(lambda step: 200 + wobble(step), total_steps=4000) == []


@pytest.mark.parametrize("jitter", [0, 3, 7])
def test_a_drain_is_silent_however_the_batches_in_flight_waver(jitter: int) -> None:
    rng = np.random.default_rng(jitter)
    in_flight = [int(value) for value in rng.integers(0, jitter + 1, size=1500)]
    # Everything was read at once, as in a small run: from the first step on the reader has nothing left to do.
    assert findings(lambda step: 1480 - step - in_flight[step], feature=lambda step: min(20, 1500 - step)) == []


def test_a_slow_producer_is_not_taken_for_a_drain() -> None:
    (finding,) = findings(lambda step: 300 if step < 500 else max(0, 300 - 0.5 * (step - 500)), steps=1000)
    assert finding.values["level"] < 225


def test_a_new_process_starts_with_an_empty_queue() -> None:
    detector = QueueDecline(HEALTH)
    context = feed(detector, [step_line(step, ready_depth=300, plan_position=step) for step in range(500)])
    detector.on_new_process()
    feed(
        detector,
        [step_line(step, ready_depth=min(100, step - 500), plan_position=step) for step in range(500, 1000)],
        context=context,
    )
    assert detector.reported() == []


def test_the_history_is_bounded_and_covers_the_whole_run() -> None:
    detector = QueueDecline(HEALTH)
    feed(detector, [step_line(step, ready_depth=300, plan_position=step) for step in range(6000)])
    track = msgspec.to_builtins(detector.parts()["memory"])["tracks"]["ready"]
    assert len(track["blocks"]) < HEALTH.queue_window
    assert track["blocks"][0][1] == 0
    assert track["blocks"][-1][2] > 5800
    assert all(a[2] + 1 == b[1] for a, b in zip(track["blocks"], track["blocks"][1:], strict=False))
