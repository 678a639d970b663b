"""What rises and stays: found from its true beginning, and told from what decays, what is hard by nature and what was planned."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.health.tail import Tail
from dflash.health.trend import binomial_tail
from dflash.records import Finding
from tests.support.health_runs import found, healthy, judged
from tests.support.log_simulator import Record, change_steps, event, scaled, spike

RUN = healthy(seed=1, steps=1600)


def risen(factor: float, *, at: int = 1000, records: tuple[Record, ...] = RUN) -> list[Record]:
    return change_steps(records, lambda r: scaled(r, loss=factor) if r.step >= at else r)


def critical(records: list[Record], detector: str) -> list[Finding]:
    return found(judged(records), detector, severity="critical")


@pytest.mark.parametrize("factor", [1.4, 1.8, 3.0])
def test_a_level_shift_is_dated_and_certain_after_fifty_steps(factor: float) -> None:
    (finding,) = critical(risen(factor), "sustained rise")
    assert 995 <= finding.onset_step <= 1006
    assert 50 <= finding.values["alarm_step"] - finding.onset_step <= 75
    assert finding.values["rise_frac"] == pytest.approx(factor - 1, rel=0.35)
    assert finding.last_step == 1599
    assert set(range(finding.onset_step, finding.values["alarm_step"] + 1)) <= set(finding.batch_ids)


def test_a_rise_too_small_to_damage_anything_is_silent() -> None:
    assert critical(risen(1.06), "sustained rise") == []


def test_a_ramp_is_found_while_every_single_point_still_looks_usual() -> None:
    ramp = change_steps(RUN, lambda r: scaled(r, loss=min(2 ** ((r.step - 900) / 120), 4.0)) if r.step >= 900 else r)
    (finding,) = critical(ramp, "sustained rise")
    assert 895 <= finding.onset_step <= 950
    assert finding.values["alarm_step"] <= 1030


@pytest.mark.parametrize("decay", [3.0, 8.0])
def test_a_spike_that_decays_is_no_rise(decay: float) -> None:
    assert critical(spike(RUN, step=1000, factor=10, decay_steps=decay), "sustained rise") == []


@pytest.mark.parametrize("share", [0.05, 0.1])
def test_hard_batches_never_add_up_to_damage(share: float) -> None:
    hard = np.random.default_rng(3).random(1600) < share
    report = judged(change_steps(RUN, lambda r: scaled(r, loss=3.0) if hard[r.step] else r))
    assert not [f for f in report.findings if f.severity == "critical"]
    spikes = found(report, "loss spike")
    assert len(spikes) > 40
    assert sum(f.severity == "warn" for f in spikes) <= 0.1 * len(spikes)  # the rest is this run's usual


def test_a_declared_change_that_settles_is_noted_and_learnt() -> None:
    records = risen(1.4)
    at = next(i for i, record in enumerate(records) if record.step == 1000)
    records.insert(at, event("epoch", step=1000, details={"epoch": 1}))
    report = judged(records)
    assert report.damage is None
    (note,) = found(report, "sustained rise")
    assert (note.severity, note.values["planned_event"], note.values["cause"]) == ("info", "epoch", "planned shift")


def test_a_declared_change_does_not_excuse_an_explosion() -> None:
    records = risen(4.0)
    at = next(i for i, record in enumerate(records) if record.step == 1000)
    records.insert(at, event("epoch", step=1000, details={"epoch": 1}))
    assert judged(records).damage is not None


def test_divergence_is_measured_from_the_best_the_bucket_reached() -> None:
    order = [step % 2 for step in range(1600)]
    slow = change_steps(RUN, lambda r: scaled(r, loss=1 + 0.9 * max(0, r.step - 300) / 1300))
    diverged = critical(slow, "divergence")
    assert len(order) == 1600
    assert diverged
    assert diverged[0].values["rise_frac"] > 0.25


def test_the_tail_is_that_of_the_noise_it_has_seen() -> None:
    rng = np.random.default_rng(0)
    normal, heavy = Tail(), Tail()
    for step, (a, b) in enumerate(zip(rng.standard_normal(20_000), rng.standard_t(3, 20_000), strict=True)):
        normal.see(float(a), step=step, loud=False)
        heavy.see(float(b), step=step, loud=False)
    assert normal.chance(6.0, step=20_000) < 2e-7
    # Student's t with 3 degrees of freedom: P(t > 10) = 1.06e-3, P(t > 20) = 1.4e-4.
    assert heavy.chance(10.0, step=20_000) == pytest.approx(1.06e-3, rel=0.5)
    assert heavy.chance(20.0, step=20_000) == pytest.approx(1.4e-4, rel=0.8)


def test_a_hump_of_hard_batches_ends_where_it_ends() -> None:
    rng = np.random.default_rng(1)
    tail = Tail()
    for step in range(2000):
        z = 10 + rng.standard_normal() if rng.random() < 0.07 else rng.standard_normal()
        tail.see(float(z), step=step, loud=False)
    assert tail.chance(9.0, step=2000) == pytest.approx(0.07 * 0.84, rel=0.5)  # P(N > -1) of the hard ones
    assert tail.chance(17.0, step=2000) < 1e-4  # seven deviations of the hard ones beyond their middle


def test_the_chances_fall_with_the_height() -> None:
    rng = np.random.default_rng(2)
    tail = Tail()
    for step, z in enumerate(rng.standard_t(4, 3000)):
        tail.see(float(z), step=step, loud=False)
    chances = [tail.chance(z, step=3000) for z in (2.0, 3.0, 3.5, 4.0, 5.0, 7.0, 10.0, 20.0, 50.0)]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] == 1.0 > chances[2]


def test_spikes_that_belong_together_do_not_excuse_each_other() -> None:
    tail, apart = Tail(points=1000), Tail(points=1000)
    for number in range(8):
        tail.see(20.0, step=100 + number, loud=False)
        apart.see(20.0, step=100 + 40 * number, loud=False)
    assert tail.chance(20.0, step=110) < 1e-5
    assert tail.chance(20.0, step=140) > 1e-3  # later on they are what the run has shown
    assert apart.chance(20.0, step=400) > 1e-3


def test_a_few_faults_teach_the_tail_little() -> None:
    warned, silent = Tail(points=1000), Tail(points=1000)
    for step in range(2):
        warned.see(25.0, step=step, loud=True)
        silent.see(25.0, step=step, loud=False)
    assert 10 * warned.chance(25.0, step=100) < silent.chance(25.0, step=100)  # as if they were noise
    assert Tail().chance(2.0, step=0) == 1.0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(trials=st.integers(1, 60), rate=st.floats(0.01, 0.99), data=st.data())
def test_the_binomial_tail_is_the_sum_of_its_terms(trials: int, rate: float, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, trials))
    exact = sum(math.comb(trials, k) * rate**k * (1 - rate) ** (trials - k) for k in range(successes, trials + 1))
    assert binomial_tail(successes, trials, rate) == pytest.approx(exact, rel=1e-9, abs=1e-12)


def test_the_binomial_tail_of_many_trials_does_not_overflow() -> None:
    assert binomial_tail(60, 5000, 0.01) == pytest.approx(0.0925, rel=0.05)
    assert binomial_tail(5000, 5000, 0.5) == 0.0
    assert binomial_tail(1, 10, 0.0) == 0.0
    assert binomial_tail(3, 2, 0.5) == 0.0
