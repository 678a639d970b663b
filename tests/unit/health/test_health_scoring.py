"""Random faults in random runs: what the checker says about them, and that what it asks for is safe."""

from __future__ import annotations

import random

import pytest

from dflash.health import critical_training_spans
from tests.support.health_runs import found, healthy, judged
from tests.support.log_simulator import Record, change_steps, nonfinite, resumed, scaled, spike

STEPS = 900


def random_fault(kind: str, *, seed: int) -> tuple[list[Record], int]:
    """A run with one fault, and the step at which it truly begins."""
    rng = random.Random(f"{kind}{seed}")
    step = rng.randrange(350, 700)
    run = healthy(seed=6 + seed % 2, steps=STEPS)
    if kind == "nan from a step on":
        return nonfinite(run, steps=range(step, STEPS), skipped=True), step
    if kind == "nan applied":
        return nonfinite(run, steps=[step], skipped=False), step
    if kind == "level shift":
        return spike(run, step=step, factor=rng.uniform(3, 8), forever=True), step
    if kind == "slow recovery":
        return spike(run, step=step, factor=rng.uniform(4, 10), decay_steps=rng.uniform(2, 8)), step
    if kind == "single spike":
        return spike(run, step=step, factor=rng.uniform(3, 10)), step
    assert kind == "gradient outlier"
    return change_steps(run, lambda r: scaled(r, grad_norm=rng.uniform(6, 17)) if r.step == step else r), step


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["nan from a step on", "nan applied", "level shift"])
def test_damage_is_found_soon_and_the_decision_is_safe(kind: str, seed: int) -> None:
    records, onset = random_fault(kind, seed=seed)
    decision = judged(records).decision
    assert decision is not None
    assert onset - 10 <= decision.onset_step <= onset + 15
    assert onset <= decision.alarm_step <= onset + 110
    assert decision.target_step is not None
    assert decision.target_step <= onset, "the state after `target` updates was made before the fault"
    assert {*range(max(onset, decision.onset_step), decision.alarm_step + 1)} <= {
        position for first, end in decision.skip for position in range(first, end)
    }


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["slow recovery", "single spike", "gradient outlier"])
def test_what_passes_is_never_acted_on(kind: str, seed: int) -> None:
    records, onset = random_fault(kind, seed=seed)
    report = judged(records)
    assert report.decision is None
    assert critical_training_spans(report) == []
    assert report.verdict == "healthy"
    detector = "gradient spike" if kind == "gradient outlier" else "loss spike"
    warnings = [f for f in found(report, detector) if onset <= f.first_step <= onset + 3]
    assert {f.severity for f in warnings} <= {"warn", "info"}
    assert warnings


@pytest.mark.parametrize("seed", range(3))
def test_the_decision_stays_the_same_while_the_log_grows(seed: int) -> None:
    records, onset = random_fault("level shift", seed=seed)
    first = None
    for end in range(onset, STEPS, 40):
        decision = judged([r for r in records if r.step < end], ended=False).decision
        if first is not None:
            assert decision is not None
            assert (decision.key, decision.onset_step, decision.skip) == (
                first.key,
                first.onset_step,
                first.skip,
            )
        first = decision
    assert first is not None


def test_a_run_that_went_back_before_the_damage_is_healthy_again() -> None:
    records, onset = random_fault("level shift", seed=0)
    sick = [r for r in records if r.step <= onset + 100]
    again = resumed(healthy(seed=6, steps=STEPS), died_at=onset + 100, from_step=200)
    healed = [*sick, *[r for r in again if r.segment == 1]]
    assert judged(sick).verdict == "unhealthy"
    report = judged(healed)
    assert report.verdict == "healthy"
    assert critical_training_spans(report) == []
    assert report.stats["dead_records"] == onset + 100 - 200 + 1
