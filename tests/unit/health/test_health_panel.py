"""Snapshots and the way back, thinned curves, and a naive loss-spike detector as the truth for the real one."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.health import HealthChecker
from dflash.health.baseline import REFRESH_POINTS
from dflash.health.detectors.base import plain
from dflash.health.history import MAX_POINTS, Curve
from dflash.health.lines import StepLine
from dflash.health.panel import Panel
from tests.support.health_runs import CHECKPOINT, HEALTH, TRAIN, found, healthy, items_of, remedy
from tests.support.log_simulator import Record, StepRecord, change_steps, nonfinite, scaled, spike

RUN = nonfinite(spike(healthy(seed=6, steps=700), step=350, factor=8, decay_steps=6), steps=[90, 120, 430], skipped=True)
LINES = [item for item in items_of(RUN) if isinstance(item, StepLine)]


def state_of(panel: Panel) -> dict[str, Any]:
    state: dict[str, Any] = msgspec.to_builtins(panel.parts(), enc_hook=plain)
    return state


def panel_after(step: int, *, snapshots: set[int]) -> Panel:
    panel = Panel(HEALTH, TRAIN, CHECKPOINT)
    for line in LINES[:step]:
        if line.step in snapshots:
            panel.snapshot(line.step)
        panel.see_step(line)
    return panel


@settings(max_examples=10, deadline=None, derandomize=True)
@given(target=st.integers(0, 600), further=st.integers(0, 100))
def test_going_back_to_a_snapshot_is_exact(target: int, further: int) -> None:
    panel = panel_after(target + further, snapshots={target})
    if further:
        panel.rewind(target)
    assert state_of(panel) == state_of(panel_after(target, snapshots=set()))


def test_going_back_between_snapshots_keeps_findings_and_learns_the_rest_again() -> None:
    panel = panel_after(600, snapshots={100, 400})
    panel.rewind(250)
    assert [snapshot.step for snapshot in panel.snapshots] == [100]
    assert state_of(panel)["context"] == state_of(panel_after(100, snapshots=set()))["context"]
    assert sorted(f.first_step for f in panel.findings()) == [90, 120]


def test_going_back_before_every_snapshot_starts_anew_but_forgets_no_finding() -> None:
    panel = panel_after(300, snapshots={200})
    panel.rewind(100)
    assert panel.snapshots == []
    assert panel.context.steps == 0
    assert [f.first_step for f in panel.findings()] == [90]


def test_only_as_many_snapshots_are_kept_as_there_are_checkpoints_to_go_back_to() -> None:
    panel = panel_after(700, snapshots=set(range(0, 700, 50)))
    kept = CHECKPOINT.keep_clean + CHECKPOINT.keep_other + 1
    assert [snapshot.step for snapshot in panel.snapshots] == list(range(0, 700, 50))[-kept:]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(length=st.integers(1, 4000), back=st.integers(0, 4000))
def test_a_curve_is_thinned_evenly_and_forgets_what_is_taken_back(length: int, back: int) -> None:
    curve = Curve()
    for step in range(length):
        if curve.wants_next():
            curve.keep(step, float(step + 1), band=(None, None))
    steps = [point.step for point in curve.points]
    assert len(steps) <= MAX_POINTS + 1
    assert steps == list(range(0, length, curve.stride))[: len(steps)]
    assert length - steps[-1] <= 2 * curve.stride
    curve.rewind(back)
    assert [point.step for point in curve.points] == [step for step in steps if step < back]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(pieces=st.lists(st.integers(0, 700), max_size=12))
def test_a_curve_keeps_the_same_points_however_its_records_come(pieces: list[int]) -> None:
    straight, cut, begun = Curve(), Curve(), 0
    for count in pieces:
        for number in cut.next_of(count):
            cut.keep(begun + number, 1.0, band=(None, None))
        begun += count
    for step in range(begun):
        if straight.wants_next():
            straight.keep(step, 1.0, band=(None, None))
    assert cut == straight


class NaiveSpike(NamedTuple):
    step: int
    bucket: int
    back: int | None


def naive_spikes(records: list[Record]) -> list[NaiveSpike]:
    """Loss spikes (without the help of the gradient) by recomputing every baseline from nothing whenever it is refreshed."""
    s = HEALTH.spike
    accepted: dict[int, list[tuple[float, float]]] = {}
    levels: dict[int, tuple[float, float, float]] = {}
    since: dict[int, int] = {}
    open_since: dict[int, int] = {}
    spikes: list[NaiveSpike] = []
    for record in records:
        if not isinstance(record, StepRecord) or record.micro_batches[0].ce_sum is None:
            continue
        (micro,) = record.micro_batches
        value, count, bucket = math.log(micro.ce_sum / micro.n_tokens), micro.n_tokens, micro.bucket  # type: ignore[operator]
        if bucket in levels:
            median, scale, usual = levels[bucket]
            spread = max(scale * math.sqrt(usual / count), s.loss_floor)
            z = (value - median) / spread
            calm = z < s.recover_z or value - median < math.log1p(HEALTH.rise.min_rise_frac) / 2
            if bucket in open_since and calm:
                spikes.append(NaiveSpike(open_since.pop(bucket), bucket, record.step))
            elif bucket not in open_since and z > s.loss_z:
                open_since[bucket] = record.step
            value = min(value, median + s.loss_z * spread)
        if bucket not in open_since:
            points = accepted[bucket] = [*accepted.get(bucket, []), (value, count)][-s.baseline_points :]
            since[bucket] = since.get(bucket, 0) + 1
            if len(points) >= s.min_points and (bucket not in levels or since[bucket] >= REFRESH_POINTS):
                levels[bucket], since[bucket] = level_of(points), 0
    spikes += [NaiveSpike(step, bucket, None) for bucket, step in open_since.items()]
    return sorted(spikes)


def level_of(points: list[tuple[float, float]]) -> tuple[float, float, float]:
    s, values = HEALTH.spike, np.array([value for value, _ in points])
    scale = max(1.4826 / math.sqrt(2) * float(np.median(np.abs(np.diff(values)))), s.loss_floor)
    return float(np.median(values[-s.level_points :])), scale, float(np.median([count for _, count in points]))


@pytest.mark.parametrize("seed", range(4))
def test_loss_spikes_are_those_of_the_naive_detector(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lift = {int(step): float(rng.uniform(1.3, 4.0)) for step in rng.choice(700, size=60, replace=False)}
    records = change_steps(healthy(seed=6, steps=700), lambda r: scaled(r, loss=lift.get(r.step, 1.0)))
    records = change_steps(records, lambda r: scaled(r, loss=3.0) if r.step > 660 else r)
    quiet = change_steps(records, lambda r: scaled(r, grad_norm=1.0 / (r.grad_norm or 1.0)))  # no gradient leads the loss
    spike_config = HEALTH.spike.model_copy(update={"usual_p": 0.999})  # nothing that stands out is usual
    checker = HealthChecker(HEALTH.model_copy(update={"spike": spike_config}), TRAIN, CHECKPOINT)
    checker.feed(items_of(quiet))
    report = checker.report(run="simulated", now_s=0.0, ended=True, remedy=remedy)
    seen = [
        NaiveSpike(f.first_step, f.bucket or 0, f.values.get("resolved_step")) for f in found(report, "loss spike", severity="warn")
    ]
    expected = naive_spikes(quiet)
    assert len(expected) > 10
    assert sorted(seen) == expected
