"""Single detectors fed by hand: borders of their windows, and brute-force truth where there is one."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import HealthConfig, SpikeConfig, TrainConfig
from dflash.health.context import RECENT_STEPS, RunContext
from dflash.health.detectors import GradSpike, NonFinite, RunLength, SaveFailure, Schedule
from dflash.health.detectors.schedule import scheduled_lr
from dflash.health.detectors.staleness import silence_limit_s, stale_finding, staleness_summary
from dflash.records import Finding
from dflash.train.schedule import lr_at
from tests.support.health_lines import event_line, feed, micro, step_line

HEALTH = HealthConfig()


def severities(findings: list[Finding]) -> list[str]:
    return [finding.severity for finding in findings]


def skipped(step: int) -> dict[str, object]:
    return {"ce": None, "grad_norm": None, "nonfinite": ("ce",), "skipped": True, "micro_batches": [micro(step, loss=None)]}


def nonfinite_findings(bad: set[int], *, steps: int = 400) -> list[Finding]:
    detector = NonFinite(HEALTH)
    feed(detector, [step_line(step, **(skipped(step) if step in bad else {})) for step in range(steps)])  # type: ignore[arg-type]
    return detector.reported()


class TestNonFinite:
    @pytest.mark.parametrize(("third", "critical"), [(199, 1), (200, 0)])
    def test_the_window_is_a_hundred_steps(self, third: int, critical: int) -> None:
        findings = nonfinite_findings({100, 150, third})
        assert severities(findings).count("critical") == critical
        assert severities(findings).count("warn") == 3

    def test_steps_in_a_row_are_one_warning_and_one_alarm(self) -> None:
        findings = nonfinite_findings(set(range(100, 140)))
        assert sorted(severities(findings)) == ["critical", "warn"]
        assert {(f.first_step, f.last_step) for f in findings} == {(100, 139)}

    def test_two_runs_far_apart_are_two_alarms(self) -> None:
        findings = [f for f in nonfinite_findings({*range(50, 55), *range(300, 305)}) if f.severity == "critical"]
        assert [(f.onset_step, f.values["alarm_step"]) for f in findings] == [(50, 52), (300, 302)]

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(bad=st.sets(st.integers(0, 399), max_size=25))
    def test_it_is_critical_iff_some_hundred_steps_hold_three(self, bad: set[int]) -> None:
        crowded = any(sum(step - 100 < other <= step for other in bad) >= 3 for step in bad)
        assert ("critical" in severities(nonfinite_findings(bad))) == crowded

    def test_a_null_loss_without_a_word_is_missing_not_nonfinite(self) -> None:
        detector = NonFinite(HEALTH)
        context = feed(detector, [step_line(0, ce=None), step_line(1)])
        assert detector.reported() == []
        assert context.steps_without_loss == 1


class TestGradSpike:
    def spikes(self, norms: dict[int, float], *, loss_spikes: tuple[int, ...] = (), steps: int = 200) -> list[Finding]:
        detector, context = GradSpike(SpikeConfig()), RunContext()
        for step in range(steps):
            if step in loss_spikes:
                context.last_loss_spike = step
            feed(detector, [step_line(step, grad_norm=norms.get(step, 1.0))], context=context)
        return detector.reported()

    def test_the_limit_is_six_floors_above_a_quiet_norm(self) -> None:
        limit = math.exp(6 * SpikeConfig().grad_floor)
        assert self.spikes({100: limit * 0.99}) == []
        (finding,) = self.spikes({100: limit * 1.01})
        assert finding.values["z"] == pytest.approx(6.07, abs=0.01)

    def test_outliers_close_together_are_one_burst(self) -> None:
        (burst,) = self.spikes({100: 9.0, 110: 30.0, 129: 9.0})
        assert (burst.first_step, burst.last_step, burst.values["outliers"]) == (100, 129, 3)
        assert burst.values["resolved_step"] == 150
        assert burst.values["worst_z"] > burst.values["z"]
        assert len(self.spikes({100: 9.0, 122: 9.0})) == 2

    def test_nothing_is_judged_in_the_warm_up(self) -> None:
        assert self.spikes({20: 1000.0}, steps=60) == []

    def test_a_loss_spike_that_came_along_is_named(self) -> None:
        (finding,) = self.spikes({100: 9.0}, loss_spikes=(101,))
        assert finding.values["loss_spike_step"] == 101

    def test_an_infinite_norm_counts_as_having_led(self) -> None:
        detector = GradSpike(SpikeConfig())
        context = feed(detector, [step_line(0), step_line(1, grad_norm=None, nonfinite=("grad_norm",)), step_line(2)])
        led = context.grad_z_before(3, steps=2)
        assert led is not None
        assert led > 1e5

    def test_a_norm_of_exactly_zero_is_no_crash(self) -> None:
        assert self.spikes({50: 0.0, 51: 0.0}) == []


class TestRunLength:
    @settings(max_examples=50, deadline=None, derandomize=True)
    @given(stretches=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=16), per_step=st.integers(1, 4))
    def test_runs_are_those_of_the_consumption_order(self, stretches: list[tuple[int, int]], per_step: int) -> None:
        buckets = [bucket for bucket, length in stretches for _ in range(length)]  # runs about the limit, not only short ones
        chunks = [list(enumerate(buckets))[i : i + per_step] for i in range(0, len(buckets), per_step)]
        lines = [
            step_line(step, micro_batches=[micro(batch, bucket=bucket) for batch, bucket in chunk])
            for step, chunk in enumerate(chunks)
        ]
        detector = RunLength(HEALTH)
        feed(detector, lines)
        runs = [list(group) for _, group in itertools.groupby(enumerate(buckets), key=lambda pair: pair[1])]
        long = [run for run in runs if len(run) > 3]
        found = detector.reported()
        assert [f.batch_ids for f in found] == [tuple(batch for batch, _ in run) for run in long]
        assert [(f.first_step, f.last_step) for f in found] == [(run[0][0] // per_step, run[-1][0] // per_step) for run in long]
        assert detector.longest == max(len(run) for run in runs)
        most = max(buckets.count(bucket) for bucket in set(buckets))
        shortest_possible = math.ceil(most / (len(buckets) - most + 1))
        assert detector.unavoidable() == shortest_possible
        assert [f.severity for f in found] == ["info" if len(run) <= shortest_possible else "warn" for run in long]


class TestSchedule:
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(
        schedule=st.sampled_from(["cosine", "linear", "constant"]),
        warmup=st.floats(0, 0.5),
        floor=st.floats(0, 1),
        total=st.integers(60, 3000),
    )
    def test_the_trainer_agrees_with_the_second_formula(self, schedule: str, warmup: float, floor: float, total: int) -> None:
        train = TrainConfig.model_validate({"schedule": schedule, "warmup_frac": warmup, "min_lr_frac": floor})
        steps = sorted({*range(12), *range(0, total, 7), total - 1})
        detector, context = Schedule(HEALTH, train), RunContext(total_steps=total)
        feed(
            detector,
            [step_line(step, lr=lr_at(train, step=step, total_steps=total, lr_scale=1.0)) for step in steps],
            context=context,
        )
        assert detector.reported() == []
        assert detector.checked == len(steps)

    @pytest.mark.parametrize("wrong", [0.5, 1.5])
    def test_another_rate_is_found_until_it_is_right_again(self, wrong: float) -> None:
        train = TrainConfig()
        lines = [
            step_line(step, lr=scheduled_lr(train, step, total=1000) * (wrong if 300 <= step < 320 else 1.0)) for step in range(400)
        ]
        detector = Schedule(HEALTH, train)
        feed(detector, lines, context=RunContext(total_steps=1000))
        (finding,) = detector.reported()
        assert (finding.first_step, finding.last_step, finding.values["resolved_step"]) == (300, 319, 320)

    def test_the_schedule_rises_once_and_falls_to_its_floor(self) -> None:
        train = TrainConfig(min_lr_frac=0.1)
        rates = [scheduled_lr(train, step, total=500) for step in range(500)]
        peak = rates.index(max(rates))
        assert max(rates) == pytest.approx(train.lr)
        assert rates[:peak] == sorted(rates[:peak])
        assert rates[peak:] == sorted(rates[peak:], reverse=True)
        assert rates[-1] == pytest.approx(0.1 * train.lr, rel=0.01)


class TestSaveFailure:
    def test_a_failure_stands_until_a_later_save_is_durable(self) -> None:
        detector = SaveFailure()
        feed(detector, [event_line("save_failed", 100, error="disk full"), event_line("save_skipped", 200)])
        assert ["resolved_step" in f.values for f in detector.reported()] == [False, False]
        feed(detector, [event_line("save_durable", 300)])
        assert [f.values["resolved_step"] for f in detector.reported()] == [300, 300]
        assert "disk full" in detector.reported()[0].message
        assert detector.checked == 3


class TestStaleness:
    def test_the_limit_follows_the_median_step(self) -> None:
        context = RunContext()
        assert silence_limit_s(HEALTH, context) == 60
        for step in range(101):
            context.see_step(step_line(step, step_time_s=20.0 if step % 2 else 1000.0 if step < 20 else 30.0))
        assert silence_limit_s(HEALTH, context) == pytest.approx(10 * 25)

    @pytest.mark.parametrize(
        ("silence_s", "ended", "stale"), [(59.9, False, False), (60.1, False, True), (1e6, True, False), (-500, False, False)]
    )
    def test_silence_counts_only_while_the_run_lives(self, silence_s: float, ended: bool, stale: bool) -> None:
        context = RunContext()
        context.see_step(step_line(7))
        finding = stale_finding(HEALTH, context, now_s=7.0 + silence_s, ended=ended, last_step=7)
        assert (finding is not None) == stale
        assert staleness_summary(HEALTH, context, found=[] if finding is None else [finding], ended=ended).findings == int(stale)

    def test_a_finished_log_may_be_silent_and_a_resumed_one_may_not(self) -> None:
        context = RunContext()
        context.see_step(step_line(7))
        context.see_event(event_line("finish", 8))
        assert stale_finding(HEALTH, context, now_s=1e6, ended=False, last_step=7) is None
        context.see_event(event_line("resume", 8))
        assert stale_finding(HEALTH, context, now_s=1e6, ended=False, last_step=7) is not None

    def test_a_log_without_any_life_is_not_stale(self) -> None:
        assert stale_finding(HEALTH, RunContext(), now_s=1e9, ended=False, last_step=-1) is None


class TestContext:
    def test_the_batches_of_a_span_are_those_of_its_steps(self) -> None:
        context = RunContext()
        for step in range(10, 30):
            context.see_step(step_line(step, micro_batches=[micro(2 * step), micro(2 * step + 1)]))
        assert context.batches_between(12, 13) == (24, 25, 26, 27)
        assert context.batches_between(0, 10) == (20, 21)
        assert context.batches_between(40, 50) == ()

    @pytest.mark.parametrize(("step", "steps", "expected"), [(5, 2, 4.0), (5, 1, 4.0), (4, 2, 3.0), (1, 2, 0.0), (0, 2, None)])
    def test_the_gradient_before_a_step_looks_only_back(self, step: int, steps: int, expected: float | None) -> None:
        context = RunContext()
        for number in range(step + 1):
            context.see_step(step_line(number))
            context.recent[-1].stands_out(float(number), chance=None)
        assert context.grad_z_before(step, steps=steps) == expected

    def test_saves_open_and_close(self) -> None:
        context = RunContext()
        for name, open_saves in [("save_begin", [4]), ("save_staged", [4]), ("heartbeat", [4]), ("save_durable", [])]:
            context.see_event(event_line(name, 4))
            assert context.open_saves == open_saves
        context.see_event(event_line("save_begin", 8))
        context.new_process()
        assert context.open_saves == []

    def test_memory_is_bounded(self) -> None:
        context = RunContext()
        for step in range(3 * RECENT_STEPS):
            context.see_step(step_line(step))
        assert len(context.recent) == RECENT_STEPS
        assert context.recent[-1].step == 3 * RECENT_STEPS - 1
        assert context.steps == 3 * RECENT_STEPS

    @pytest.mark.parametrize("total", ["100", None, -3, 0, 2.5])
    def test_only_a_positive_whole_number_of_steps_is_believed(self, total: object) -> None:
        context = RunContext()
        context.see_event(event_line("start", 0, total_steps=total))
        assert context.total_steps is None
