"""Injected faults: the right detector, severity, steps and batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dflash.records import StepRecord
from tests.support.health_runs import found, healthy, judged, summary_of
from tests.support.log_simulator import (
    BUCKETS,
    Record,
    change_steps,
    declining_queue,
    event,
    interleaved,
    nonfinite,
    scaled,
    simulate_run,
    spike,
    without_steps,
)

RUN = healthy(seed=1, steps=2000)


def bucket_at(step: int) -> int:
    return next(r for r in RUN if isinstance(r, StepRecord) and r.step == step).micro_batches[0].bucket


def step_in(bucket: int, *, after: int) -> int:
    return next(step for step in range(after, 2000) if bucket_at(step) == bucket)


def test_one_skipped_nan_is_a_warning_that_settles() -> None:
    report = judged(nonfinite(RUN, steps=[700], skipped=True))
    (finding,) = found(report, "non-finite")
    assert (finding.severity, finding.first_step, finding.last_step, finding.batch_ids) == ("warn", 700, 700, (700,))
    assert finding.values["resolved_step"] == 800
    assert report.verdict == "healthy"
    fresh = judged([r for r in nonfinite(RUN, steps=[700], skipped=True) if r.step < 790], ended=False)
    assert fresh.verdict == "watch"


def test_a_nan_run_is_critical_at_its_third_step() -> None:
    report = judged(nonfinite(RUN, steps=range(900, 931), skipped=True))
    (critical,) = found(report, "non-finite", severity="critical")
    assert (critical.onset_step, critical.values["alarm_step"], critical.last_step) == (900, 902, 930)
    assert report.verdict == "unhealthy"
    assert report.decision is not None
    assert (report.decision.onset_step, report.decision.alarm_step) == (900, 902)
    assert report.decision.target_step == 600
    assert report.decision.skip == ((899, 903),)


def test_nonfinite_steps_far_apart_are_not_damage() -> None:
    report = judged(nonfinite(RUN, steps=[700, 760, 820, 880], skipped=True))
    assert [f.severity for f in found(report, "non-finite")] == ["warn"] * 4


def test_an_applied_nan_is_critical_at_once_and_needs_no_warm_up() -> None:
    report = judged(nonfinite(RUN, steps=[0], skipped=False))
    (finding,) = found(report, "non-finite")
    assert (finding.severity, finding.onset_step, finding.values["alarm_step"]) == ("critical", 0, 0)
    assert report.decision is not None
    assert report.decision.target_step == 0


def test_a_spike_that_recovers_is_a_warning_with_its_batch() -> None:
    step = step_in(3, after=1200)
    report = judged(spike(RUN, step=step, factor=7))
    (finding,) = found(report, "loss spike")
    assert (finding.severity, finding.first_step, finding.last_step, finding.bucket) == ("warn", step, step, 3)
    assert finding.batch_ids == (step,)
    assert finding.values["z"] > 6
    assert finding.values["loss"] / finding.values["usual"] == pytest.approx(7, rel=0.3)
    assert step < finding.values["resolved_step"] < step + 40
    assert report.verdict == "healthy"
    gradient = next(f for f in found(report, "gradient spike") if f.first_step == step)
    assert gradient.severity == "info"  # 7x lies within this simulator's own noise: alone it would not be worth a warning
    assert gradient.values["loss_spike_step"] == step


def test_a_spike_that_decays_slowly_is_one_event() -> None:
    step = step_in(3, after=1200)
    report = judged(spike(RUN, step=step, factor=10, decay_steps=10))
    findings = found(report, "loss spike")
    assert len(findings) > 2
    assert "critical" not in {f.severity for f in findings}
    assert min(f.first_step for f in findings) == step
    assert all(step <= f.first_step < step + 40 and "resolved_step" in f.values for f in findings)
    assert report.decision is None


def test_a_spike_that_stays_is_critical_within_a_hundred_steps() -> None:
    report = judged(spike(RUN, step=1300, factor=3, forever=True))
    (critical,) = found(report, "loss spike", severity="critical")
    assert 1290 <= critical.onset_step <= 1300
    assert 1350 <= critical.values["alarm_step"] <= 1400
    assert critical.last_step >= 1990
    assert critical.values["buckets"] == [0, 1, 2, 3, 4, 5]
    assert report.verdict == "unhealthy"
    assert report.decision is not None
    alarm, onset = report.decision.alarm_step, report.decision.onset_step
    assert report.decision.skip == ((onset - 1, alarm + 1),)
    assert report.decision.target_step == 600


def test_a_spike_still_open_is_watched_not_judged() -> None:
    report = judged([r for r in spike(RUN, step=1300, factor=3, forever=True) if r.step < 1330], ended=False)
    assert report.verdict == "watch"
    assert report.decision is None
    assert not found(report, "loss spike", severity="critical")


def test_three_separate_spikes_in_twenty_steps_are_critical() -> None:
    first = step_in(3, after=1400)
    steps = [first, first + 7, first + 14]
    records: list[Record] = list(RUN)
    for step in steps:
        records = spike(records, step=step, factor=9)
    report = judged(records)
    (critical,) = found(report, "loss spike", severity="critical")
    assert (critical.onset_step, critical.values["alarm_step"]) == (steps[0], steps[2])
    assert critical.values["chance_p"] < 3e-4
    assert {batch for f in found(report, "loss spike", severity="warn") for batch in f.batch_ids} == set(steps)
    assert report.decision is not None
    ((first, end),) = report.decision.skip
    assert first <= min(steps)
    assert max(steps) < end


def test_a_smaller_spike_counts_when_the_gradient_led_it() -> None:
    step = step_in(5, after=1500)
    level = judged(RUN).stats["buckets"]["5"]
    record = next(r for r in RUN if isinstance(r, StepRecord) and r.step == step)
    assert record.ce is not None
    # Five deviations: between the limit after a gradient spike (4) and the limit alone (6).
    lift = float(np.exp(np.log(level["loss_median"]) + 5 * max(level["log_loss_scale"], 0.08))) / record.ce
    alone = change_steps(RUN, lambda r: scaled(r, loss=lift) if r.step == step else r)
    led = change_steps(alone, lambda r: scaled(r, grad_norm=8.0) if r.step == step - 1 else r)
    late = change_steps(alone, lambda r: scaled(r, grad_norm=8.0) if r.step == step - 3 else r)
    assert not found(judged(alone), "loss spike", severity="warn")
    assert [f.first_step for f in found(judged(led), "loss spike", severity="warn")] == [step]
    assert not found(judged(late), "loss spike", severity="warn")


def test_a_harmless_gradient_outlier_settles() -> None:
    report = judged(change_steps(RUN, lambda r: scaled(r, grad_norm=15.0) if r.step == 1000 else r))
    (finding,) = found(report, "gradient spike")
    assert (finding.severity, finding.first_step, finding.bucket) == ("warn", 1000, bucket_at(1000))
    assert finding.values["resolved_step"] == 1021
    assert finding.values["loss_spike_step"] is None
    assert report.verdict == "healthy"


@pytest.mark.parametrize(("first", "last", "severity"), [(650, 655, "warn"), (800, 801, "info")])
def test_a_gap_is_a_warning_unless_a_save_explains_it(first: int, last: int, severity: str) -> None:
    report = judged(without_steps(RUN, first, last))
    (finding,) = found(report, "step integrity")
    assert (finding.severity, finding.first_step, finding.last_step, finding.domain) == (severity, first, last, "operations")
    assert report.coverage_frac == pytest.approx(1 - (last - first + 1) / 2000)
    assert report.records == 2000 - (last - first + 1)


def test_a_log_full_of_holes_is_blind() -> None:
    report = judged(without_steps(RUN, 500, 600))
    assert report.verdict == "blind"
    assert "covers only 95.0 %" in report.headline


def test_a_log_that_starts_late_has_a_gap() -> None:
    (finding,) = found(judged(without_steps(RUN, 0, 9)), "step integrity")
    assert (finding.first_step, finding.last_step) == (0, 9)


def test_a_duplicate_is_a_warning_and_counts_once() -> None:
    doubled = [r for record in RUN for r in ([record] * 2 if isinstance(record, StepRecord) and record.step == 600 else [record])]
    report = judged(doubled)
    (finding,) = found(report, "step integrity")
    assert (finding.severity, finding.first_step) == ("warn", 600)
    assert report.records == 2000
    assert report.verdict == "healthy"


def test_steps_backwards_without_a_new_segment_make_the_log_unfit_to_judge() -> None:
    late = [r for r in RUN if isinstance(r, StepRecord) and 300 <= r.step < 310]
    at = next(i for i, r in enumerate(RUN) if isinstance(r, StepRecord) and r.step == 500)
    report = judged([*RUN[:at], *late, *RUN[at:]])
    (finding,) = found(report, "step integrity", severity="critical")
    assert finding.first_step == 300
    assert finding.domain == "operations"
    assert report.verdict == "blind"
    assert report.decision is None


def test_a_clock_that_runs_back_is_a_warning() -> None:
    report = judged(change_steps(RUN, lambda r: replace(r, mono_time_s=r.mono_time_s - 50.0) if r.step == 444 else r))
    (finding,) = found(report, "step integrity")
    assert (finding.severity, finding.first_step) == ("warn", 444)


def test_a_long_run_of_one_bucket_is_named_with_its_batches() -> None:
    order = interleaved(np.random.default_rng(3), 800, shares=[b.share for b in BUCKETS])
    order[600:609] = [4] * 9
    order[599], order[609] = 2, 1
    report = judged(simulate_run(seed=1, steps=800, lr=lambda step: 1e-3, order=order))
    (finding,) = found(report, "bucket run")
    assert (finding.severity, finding.first_step, finding.last_step, finding.bucket) == ("warn", 600, 608, 4)
    assert finding.batch_ids == tuple(range(600, 609))
    assert finding.values["length"] == 9
    assert "longest run: 9, from step 600" in summary_of(report, "bucket run").note


def test_a_run_that_no_order_could_avoid_is_only_noted() -> None:
    order = [3 if step % 8 else 1 for step in range(400)]
    report = judged(simulate_run(seed=1, steps=400, lr=lambda step: 1e-3, order=order))
    assert len(found(report, "bucket run")) == 50
    assert {f.severity for f in found(report, "bucket run")} == {"info"}


def test_a_declared_skip_may_join_two_runs() -> None:
    order = interleaved(np.random.default_rng(3), 300, shares=[b.share for b in BUCKETS])
    order[99:107] = [1, 4, 4, 4, 4, 4, 4, 1]
    order[103] = 4
    records = simulate_run(seed=1, steps=300, lr=lambda step: 1e-3, order=order)
    at = next(i for i, r in enumerate(records) if isinstance(r, StepRecord) and r.step == 103)
    skipped = [*records[:at], event("skip", step=103), *records[at:]]
    not_applied = [*records[:at], event("skip", step=103, details={"nonfinite": ["ce"], "batch_ids": [102]}), *records[at:]]
    assert [f.first_step for f in found(judged(records), "bucket run")] == [100]
    assert [f.first_step for f in found(judged(not_applied), "bucket run")] == [100]
    assert not found(judged(skipped), "bucket run")


def test_a_queue_that_sinks_from_300_to_220_is_seen() -> None:
    report = judged([r for r in declining_queue(RUN, first=800, last=1400, to=220) if r.step < 1600], ended=False)
    (finding,) = found(report, "queue decline")
    assert (finding.severity, finding.domain, finding.values["queue"]) == ("warn", "operations", "ready")
    assert 780 <= finding.onset_step <= 950
    assert finding.values["mann_kendall_p"] < 0.01
    assert finding.values["settled"] == pytest.approx(299, abs=3)
    assert finding.values["level"] == pytest.approx(220, abs=6)
    assert report.verdict == "watch"


def test_a_queue_that_comes_back_settles() -> None:
    sunk = declining_queue(RUN, first=500, last=700, to=150)
    back = [u if isinstance(u, StepRecord) and u.step >= 760 else s for s, u in zip(sunk, RUN, strict=True)]
    report = judged(back)
    (finding,) = found(report, "queue decline")
    assert finding.values["resolved_step"] > 760
    assert report.verdict == "healthy"


def test_the_drain_at_the_end_of_the_plan_is_no_decline() -> None:
    depths = [r.ready_depth for r in RUN if isinstance(r, StepRecord)]
    assert depths[1500] > 290
    assert depths[-1] == 0
    assert not found(judged(RUN), "queue decline")


@pytest.mark.parametrize("later_s", [59.0, 61.0])
def test_a_silent_log_is_blind_after_a_minute(later_s: float) -> None:
    records = [r for r in RUN if r.step < 500]
    report = judged(records, ended=False, later_s=later_s)
    stale = found(report, "stale log")
    assert len(stale) == (later_s > 60)
    assert report.verdict == ("blind" if stale else "healthy")
    if stale:
        assert (stale[0].severity, stale[0].domain, stale[0].last_step) == ("critical", "operations", 499)


def test_slow_steps_are_given_ten_times_their_length() -> None:
    slow = change_steps([r for r in RUN if r.step < 500], lambda r: replace(r, step_time_s=30.0))
    assert not found(judged(slow, ended=False, later_s=290.0), "stale log")
    assert found(judged(slow, ended=False, later_s=310.0), "stale log")


def test_a_heartbeat_is_no_sign_of_the_trainer_but_a_save_is() -> None:
    records = [r for r in RUN if r.step < 500]
    beats = [*records, event("heartbeat", step=499, at_step=1000)]
    saves = [*records, event("save_durable", step=400, at_step=1000)]
    assert found(judged(beats, ended=False), "stale log")
    assert not found(judged(saves, ended=False), "stale log")


def test_a_warm_up_that_logs_the_peak_rate_is_a_mismatch() -> None:
    report = judged(change_steps(RUN, lambda r: replace(r, lr=6e-3) if r.step < 40 else r))
    (finding,) = found(report, "lr mismatch")
    assert (finding.severity, finding.first_step, finding.last_step) == ("warn", 0, 39)
    assert finding.values["scheduled_lr"] == pytest.approx(6e-3 / 80)
    assert finding.values["resolved_step"] == 40


def test_without_the_number_of_steps_the_schedule_is_not_checked() -> None:
    report = judged(RUN[1:])
    assert summary_of(report, "lr mismatch").checked == 0
    assert "not checked" in summary_of(report, "lr mismatch").note


def test_a_failed_save_is_a_warning_until_a_later_one_is_durable() -> None:
    at = RUN.index(next(r for r in RUN if r.step == 500))
    failed = [*RUN[:at], event("save_failed", step=400, at_step=500, details={"reason": "No space left on device"}), *RUN[at:]]
    report = judged(failed)
    (finding,) = found(report, "save failure")
    assert "No space left" in finding.message
    assert finding.values["resolved_step"] == 600
    (dropped,) = found(judged([*RUN, event("log_drops", step=1999, details={"dropped": 3})]), "step integrity")
    assert "dropped" in dropped.message
