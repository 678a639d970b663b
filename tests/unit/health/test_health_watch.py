"""Accuracy, clipping, sensors, saves, shares, speed and what was consumed: single detectors fed by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import SpikeConfig, WatchConfig
from dflash.health.detectors import (
    AccuracyDrop,
    DeadMetric,
    GradientExplosion,
    RepeatedData,
    SaveStall,
    ShareDrift,
    ShortWindow,
    TargetBalance,
    Throughput,
)
from dflash.health.lines import StepLine
from dflash.health.seen import Seen
from dflash.records import StepRecord
from tests.support.health_lines import event_line, feed, micro, step_line
from tests.support.health_runs import found, healthy, judged
from tests.support.log_simulator import Record, change_steps, event, resumed, scaled

WATCH = WatchConfig()
RUN = healthy(seed=1, steps=1200)


class TestAccuracyDrop:
    def batches(self, hits: dict[int, int], *, n_tokens: int = 200, steps: int = 100) -> AccuracyDrop:
        detector, rng = AccuracyDrop(WATCH), random.Random(1)
        lines = [
            step_line(s, micro_batches=[micro(s, n_tokens=n_tokens, hits=hits.get(s, n_tokens // 2 + rng.randrange(-5, 6)))])
            for s in range(steps)
        ]
        feed(detector, lines)
        return detector

    @pytest.mark.parametrize(("first", "needed"), [(60, 4), (300, 3)])
    def test_collapsed_batches_in_a_row_are_a_drop_and_it_ends(self, first: int, needed: int) -> None:
        """Three where enough is known of the bucket to call that rare, one more where it is young."""
        (finding,) = self.batches({first: 10, first + 1: 12, first + 2: 9, first + 3: 11}, steps=400).reported()
        assert (finding.severity, finding.first_step, finding.last_step) == ("warn", first, first + 3)
        assert finding.batch_ids == tuple(range(first, first + needed))
        assert finding.values["resolved_step"] == first + 4
        assert finding.values["usual"] == pytest.approx(0.5, abs=0.02)

    def test_two_in_a_row_are_none(self) -> None:
        assert self.batches({60: 10, 61: 12, 70: 9, 71: 9}).reported() == []

    def test_no_hit_among_few_tokens_says_nothing(self) -> None:
        assert self.batches(dict.fromkeys(range(60, 70), 0), n_tokens=4).reported() == []


class TestGradientExplosion:
    def test_twenty_updates_clipped_to_nothing_are_damage(self) -> None:
        detector = GradientExplosion(WATCH)
        exploded: dict[str, Any] = {"grad_norm": 60.0, "clip_coef": 1 / 60}
        feed(detector, [step_line(s, **(exploded if s >= 50 else {})) for s in range(90)])
        (finding,) = detector.reported()
        assert (finding.severity, finding.onset_step, finding.values["alarm_step"], finding.last_step) == ("critical", 50, 69, 89)

    def test_a_run_that_is_clipped_hard_all_its_life_is_none(self) -> None:
        detector = GradientExplosion(WATCH)
        feed(detector, [step_line(s, grad_norm=60.0 + s % 7, clip_coef=1 / 60) for s in range(200)])
        assert detector.reported() == []

    def test_nineteen_are_none(self) -> None:
        detector = GradientExplosion(WATCH)
        exploded: dict[str, Any] = {"grad_norm": 60.0, "clip_coef": 1 / 60}
        feed(detector, [step_line(s, **(exploded if 50 <= s < 69 else {})) for s in range(90)])
        assert detector.reported() == []


class TestDeadMetric:
    def lines(self, **frozen: Any) -> list[StepLine]:
        alive = [step_line(s, ce=1 + s / 1000, accuracy=0.5 + s / 1000, grad_norm=1 + s / 999) for s in range(120)]
        return [msgspec.structs.replace(line, **(frozen if line.step >= 60 else {})) for line in alive]

    @pytest.mark.parametrize(("name", "shown"), [("ce", "loss"), ("accuracy", "accuracy"), ("grad_norm", "gradient norm")])
    def test_fifty_equal_values_are_a_dead_metric(self, name: str, shown: str) -> None:
        detector = DeadMetric(WATCH)
        feed(detector, self.lines(**{name: 0.25}))
        (finding,) = detector.reported()
        assert (finding.severity, finding.first_step, finding.values["metric"]) == ("warn", 60, shown)
        assert finding.values["records"] == 60

    def test_a_gradient_of_nothing_is_told_at_once_and_until_it_is_back(self) -> None:
        detector = DeadMetric(WATCH)
        feed(detector, [step_line(s, ce=1 + s, accuracy=s / 99, grad_norm=0.0 if 7 <= s < 9 else 1.0 + s) for s in range(12)])
        (finding,) = detector.reported()
        assert (finding.first_step, finding.last_step, finding.values["resolved_step"]) == (7, 8, 9)


class TestSaveStall:
    def run(self, *, slow: float, saves: int = 3, ends: bool = True) -> SaveStall:
        detector = SaveStall(WATCH)
        lines: list[object] = []
        for s in range(100 * saves + 90):
            if s and s % 100 == 0:
                lines.append(event_line("save_begin", s))
            during = s % 100 < 4 and s >= 100
            lines.append(step_line(s, step_time_s=slow if during else 1.0 + s % 3 / 100))
            if ends and s > 100 and s % 100 == 4:
                lines.append(replace_event(event_line("save_durable", s - 4), at=s))
        feed(detector, lines)  # type: ignore[arg-type]
        return detector

    def test_slow_steps_during_saves_are_one_warning_that_counts(self) -> None:
        (finding,) = self.run(slow=3.0).reported()
        assert (finding.severity, finding.first_step, finding.values["saves"]) == ("warn", 100, 3)
        assert finding.values["slowest_s"] == pytest.approx(3.0)

    def test_saves_that_hold_nothing_up_are_silent(self) -> None:
        assert self.run(slow=1.2).reported() == []

    def test_a_save_that_does_not_end_is_critical_for_operations(self) -> None:
        (finding,) = self.run(slow=1.0, saves=1, ends=False).reported()
        assert (finding.severity, finding.domain, finding.first_step) == ("critical", "operations", 100)
        assert finding.values["alarm_step"] == 161


def replace_event(line: object, *, at: int) -> object:
    return msgspec.structs.replace(line, wall_time_s=float(at))  # type: ignore[type-var]


class TestShares:
    def test_a_bucket_that_takes_over_is_named_with_its_share(self) -> None:
        detector, rng = ShareDrift(WATCH), random.Random(4)
        lines = [
            step_line(s, micro_batches=[micro(s, bucket=0 if rng.random() < (0.25 if s < 1100 else 0.6) else 1 + s % 3)])
            for s in range(1900)
        ]
        feed(detector, lines)
        (drift,) = [f for f in detector.reported() if f.bucket == 0]
        assert 900 <= drift.first_step <= 1100
        assert drift.values["share"] > 0.4 > drift.values["reference"]

    def test_a_declared_plan_is_the_reference(self) -> None:
        detector = ShareDrift(WATCH)
        lines = [event_line("config", 0, bucket_shares={"0": 0.5, "1": 0.5})]
        feed(detector, [*lines, *[step_line(s, micro_batches=[micro(s, bucket=s % 4 == 0)]) for s in range(300)]])
        assert {f.bucket for f in detector.reported()} == {0, 1}
        assert all("planned" in f.message for f in detector.reported())

    @pytest.mark.parametrize("shares", [3, {"0": "half"}, {"\u00b2": 0.5}, {"9" * 30: 0.5}, {"0": 10**400}])
    def test_shares_that_are_none_declare_nothing(self, shares: object) -> None:
        detector = ShareDrift(WATCH)
        feed(detector, [event_line("config", 0, bucket_shares=shares)])
        assert not detector.parts()["memory"].declared


class TestSpeed:
    @pytest.mark.parametrize(("speed", "severities"), [(0.92, []), (0.7, ["warn"]), (0.4, ["critical", "warn"])])
    def test_throughput_is_compared_per_bucket(self, speed: float, severities: list[str]) -> None:
        detector = Throughput(WATCH)
        usual = {0: 100.0, 1: 900.0}
        lines = [
            step_line(s, micro_batches=[micro(s, bucket=s % 2)], tokens_per_s=usual[s % 2] * (speed if s >= 300 else 1.0))
            for s in range(420)
        ]
        feed(detector, lines)
        assert sorted(f.severity for f in detector.reported()) == severities
        assert all(265 <= f.first_step <= 305 and f.domain == "operations" for f in detector.reported())

    def test_a_slow_target_is_named(self) -> None:
        detector = TargetBalance(WATCH)
        feed(detector, [step_line(s, target_depths=(s, s, s // 3)) for s in range(60)])
        (finding,) = detector.reported()
        assert finding.values["target"] == 2
        feed(detector, [step_line(60 + s, target_depths=(60 + s, 60 + s, 20 + s)) for s in range(40)])
        assert "resolved_step" in detector.reported()[0].values

    def test_one_target_has_nobody_to_differ_from(self) -> None:
        detector = TargetBalance(WATCH)
        feed(detector, [step_line(s, target_depths=(s,)) for s in range(100)])
        assert (detector.reported(), detector.checked) == ([], 0)


class TestConsumed:
    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(batches=st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=6, unique=True), max_size=40))
    def test_a_set_of_samples_is_a_set_and_survives_as_text(self, batches: list[list[int]]) -> None:
        seen, truth = Seen(), set[int]()
        for batch in batches:
            assert seen.add_all(tuple(batch)) == [row for row in batch if row in truth]
            truth |= set(batch)
            seen = Seen.of_text(seen.text())
        assert seen.add_all(tuple(range(301))) == sorted(truth)

    def test_a_sample_twice_in_an_epoch_is_damage_and_in_the_next_is_not(self) -> None:
        detector = RepeatedData()
        lines = [step_line(s, micro_batches=[micro(s, rows=(2 * s, 2 * s + 1), epoch=s // 50)]) for s in range(50)]
        lines += [step_line(50 + s, micro_batches=[micro(50 + s, rows=(2 * s, 2 * s + 1), epoch=1)]) for s in range(20)]
        feed(detector, lines)
        assert detector.reported() == []
        feed(detector, [step_line(70, micro_batches=[micro(70, rows=(3, 99), epoch=1)])])
        (finding,) = detector.reported()
        assert (finding.severity, finding.onset_step, finding.values["samples"]) == ("critical", 70, [3])

    def test_records_abandoned_by_a_resume_have_consumed_nothing(self) -> None:
        assert not found(judged(resumed(RUN, died_at=560, from_step=400)), "repeated data")

    def test_a_resume_that_lost_its_place_is_damage(self) -> None:
        again = resumed(RUN, died_at=560, from_step=400)

        def back(record: Record) -> Record:
            if not isinstance(record, StepRecord) or record.segment == 0:
                return record
            (m,) = record.micro_batches
            return replace(record, micro_batches=(replace(m, batch_id=m.batch_id - 80, rows=tuple(row - 640 for row in m.rows)),))

        report = judged([back(record) for record in again])
        (finding,) = found(report, "repeated data")
        assert (finding.onset_step, finding.values["cause"]) == (400, "replayed data")
        assert report.damage is not None

    @pytest.mark.parametrize(("factor", "bad"), [(1.0, False), (1.7, True)])
    def test_a_resume_is_compared_with_what_was_before(self, factor: float, bad: bool) -> None:
        again = resumed(RUN, died_at=560, from_step=400)
        again = change_steps(again, lambda r: scaled(r, loss=factor) if r.segment == 1 else r)
        findings = found(judged(again), "bad resume")
        assert bool(findings) == bad
        assert all(f.severity == "critical" and f.onset_step == 400 and f.values["alarm_step"] <= 440 for f in findings)


class TestArtefact:
    def test_few_samples_explain_a_height_that_would_else_be_a_spike(self) -> None:
        def short(record: StepRecord) -> StepRecord:
            if record.step not in (900, 902):
                return record
            (m,) = scaled(record, loss=2.2).micro_batches
            frac = 10 / m.n_tokens
            return replace(record, micro_batches=(replace(m, n_tokens=10, ce_sum=(m.ce_sum or 0.0) * frac),))

        report = judged(change_steps(RUN, short))
        (note,) = found(report, "short window")
        assert (note.severity, note.first_step, note.values["records"]) == ("info", 900, 2)
        assert note.values["cause"] == "window artefact"
        assert note.values["z_unscaled"] > SpikeConfig().loss_z > WATCH.artefact_z > note.values["z"]
        assert not [f for f in found(report, "loss spike") if f.first_step in (900, 902)]
        assert ShortWindow.domain == "diagnosis"


def test_a_hanging_save_or_a_crawl_is_worth_a_look_and_not_blindness() -> None:
    slow = change_steps(RUN, lambda r: replace(r, tokens_per_s=0.3 * r.tokens_per_s) if r.step > 900 else r)
    report = judged([*slow, event("heartbeat", step=1199)], ended=False)
    assert found(report, "throughput", severity="critical")
    assert (report.verdict, report.damage) == ("watch", None)
