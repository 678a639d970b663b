"""Records judged many at once against the same records judged one by one, and samples given back by a way back."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.health import HealthChecker
from dflash.health.context import RunContext
from dflash.health.detectors import GradSpike, RepeatedData
from dflash.health.detectors.base import plain
from dflash.health.detectors.replay import Taken
from dflash.health.lines import EventLine, LogItem, StepLine
from dflash.health.panel import Panel
from dflash.health.seen import MAX_SAMPLE, Seen
from tests.support.amount import amount
from tests.support.health_lines import micro, step_line
from tests.support.health_runs import CHECKPOINT, HEALTH, TRAIN, healthy, items_of
from tests.support.log_simulator import Record, StepRecord, change_steps, event, nonfinite, scaled, spike

STEPS = 420


def faulty() -> list[LogItem]:
    """A run with a bit of everything: spikes, skipped updates, frozen and zero metrics, slow steps, repeats, sums over two."""

    def change(record: StepRecord) -> StepRecord:
        (m,) = record.micro_batches
        step = record.step
        if 130 <= step < 190:
            record = replace(record, accuracy=0.25, grad_norm=0.0 if step < 133 else record.grad_norm)
        if 195 <= step < 219:
            record = replace(record, micro_batches=(replace(m, correct=(0,) * 7),))
        if step in (250, 251):
            record = replace(record, micro_batches=(replace(m, rows=tuple(range(8))),))
        if 260 <= step < 300:
            half = replace(m, n_tokens=m.n_tokens // 2 + 1, ce_sum=None if m.ce_sum is None else m.ce_sum / 2, rows=())
            record = replace(record, micro_batches=(half, replace(half, bucket=(m.bucket + 1) % 6)))
        if step >= 330:
            record = replace(
                record, tokens_per_s=record.tokens_per_s / 4, lr=record.lr * 2, mono_time_s=record.mono_time_s - 9 * (step == 350)
            )
        return record

    records: Sequence[Record] = spike(healthy(seed=8, steps=STEPS), step=220, factor=9, decay_steps=4)
    records = nonfinite(records, steps=[100, 310], skipped=True)
    records = change_steps(records, lambda r: scaled(r, grad_norm=40.0) if 370 <= r.step < 374 else r)
    return items_of(change_steps(records, change))


ITEMS = faulty()
LINES = [item for item in ITEMS if isinstance(item, StepLine)]


def decoded(panel: Panel) -> object:
    return msgspec.to_builtins(panel.parts(), enc_hook=plain)


def cut_points(cuts: set[int]) -> list[int]:
    return sorted({0, len(LINES), *cuts})


@settings(max_examples=12, deadline=None, derandomize=True)
@given(cuts=st.sets(st.integers(1, STEPS - 1), max_size=30))
def test_a_stretch_is_judged_as_its_records_one_by_one(cuts: set[int]) -> None:
    stretches = Panel(HEALTH, TRAIN, CHECKPOINT)
    stretches.see_event(next(item for item in ITEMS if isinstance(item, EventLine)))
    for first, end in pairwise(cut_points(cuts)):
        stretches.see_stretch(LINES[first:end])
    assert decoded(stretches) == one_by_one()


@functools.cache
def one_by_one() -> object:
    panel = Panel(HEALTH, TRAIN, CHECKPOINT)
    panel.see_event(next(item for item in ITEMS if isinstance(item, EventLine)))
    for line in LINES:
        panel.see_step(line)
    found = {finding.detector for finding in panel.findings()}
    assert {"loss spike", "non-finite", "dead metric", "accuracy drop", "repeated data", "lr mismatch", "gradient spike"} <= found
    return decoded(panel)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(cuts=st.sets(st.integers(1, len(ITEMS) - 1), max_size=12))
def test_a_checker_is_the_same_however_its_items_come(cuts: set[int]) -> None:
    whole, pieces = HealthChecker(HEALTH, TRAIN, CHECKPOINT), HealthChecker(HEALTH, TRAIN, CHECKPOINT)
    whole.feed(ITEMS)
    for first, end in pairwise(sorted({0, len(ITEMS), *cuts})):
        pieces.feed(ITEMS[first:end])
        before = msgspec.msgpack.decode(pieces.packed())
        pieces = HealthChecker.of_packed(pieces.packed(), HEALTH, TRAIN, CHECKPOINT)
        assert msgspec.msgpack.decode(pieces.packed()) == before
        json.dumps(before, allow_nan=False, default=bytes.hex)
    reports = [each.report(run="x", now_s=0.0, ended=True, remedy=lambda _damage: None) for each in (whole, pieces)]
    assert reports[0] == reports[1]
    assert whole.history == pieces.history


def declared_shift() -> list[LogItem]:
    """A loss that a declared change moves for good, among gradients that are missing at first, burst, and come of two buckets."""
    rng = np.random.default_rng(4)

    def change(record: StepRecord) -> StepRecord:
        step = record.step
        record = scaled(record, loss=1.32 if step >= 420 else 1.0, grad_norm=30.0 if step in (300, 301, 500) else 1.0)
        (m,) = record.micro_batches
        if step % 9 == 0:
            low = replace(m, correct=(0,) * 7) if 330 <= step < 390 else m
            other = replace(low, rows=(), ce_sum=(m.ce_sum or 0.0) * float(rng.uniform(0.9, 1.1)))
            record = replace(record, micro_batches=(low, other))
        return replace(record, grad_norm=None) if step < 70 or 200 <= step < 203 else record

    records = change_steps(spike(healthy(seed=12, steps=640), step=300, factor=7, decay_steps=3), change)
    declared = event("epoch", step=420)
    return items_of([each for record in records for each in ((declared, record) if record.step == 420 else (record,))])


def test_what_a_declared_change_explains_is_the_same_in_stretches_and_one_by_one() -> None:
    items = declared_shift()
    whole, single = HealthChecker(HEALTH, TRAIN, CHECKPOINT), HealthChecker(HEALTH, TRAIN, CHECKPOINT)
    whole.feed(items)
    for item in items:
        single.feed([item])
    states = [msgspec.msgpack.decode(each.packed()) for each in (whole, single)]
    for part in ("panel", "history", "live", "integrity"):
        assert states[0][part] == states[1][part]
    assert [each["state"] for each in states[0]["snapshots"]] == [each["state"] for each in states[1]["snapshots"]]
    report = whole.report(run="x", now_s=0.0, ended=True, remedy=lambda _damage: None)
    assert any(f.detector == "sustained rise" and "declared change" in f.message for f in report.findings)
    assert {"loss spike", "gradient spike"} <= {f.detector for f in report.findings}


def test_the_first_gradient_of_a_log_says_nothing_of_the_losses_before_it() -> None:
    detector, context = GradSpike(HEALTH.spike), RunContext()
    lines = [step_line(step, grad_norm=None if step < 3 else 1.0) for step in range(6)]
    context.see_stretch(lines)
    assert detector.on_stretch(lines, context) == 3
    assert not context.gradients
    assert detector.on_stretch(lines[3:], context) == 3
    assert context.gradients


class TestSamplesGivenBack:
    def line(self, step: int, rows: Sequence[int], *, epoch: int = 0) -> StepLine:
        return step_line(step, micro_batches=[micro(step, rows=rows, epoch=epoch)])

    def panel(self) -> Panel:
        return Panel(HEALTH, TRAIN, CHECKPOINT)

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(
        steps=st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=3, unique=True), min_size=2, max_size=25),
        epoch_at=st.integers(1, 25),
        data=st.data(),
    )
    def test_after_a_way_back_exactly_the_samples_before_it_count(
        self, steps: list[list[int]], epoch_at: int, data: st.DataObject
    ) -> None:
        target = data.draw(st.integers(0, len(steps) - 1))
        marks = data.draw(st.sets(st.integers(0, len(steps) - 1), max_size=4)) | {target}
        panel, truth = self.panel(), {0: set[int](), 1: set[int]()}
        for step, rows in enumerate(steps):
            epoch = int(step >= epoch_at)
            if step in marks:
                panel.snapshot(step)
            panel.see_step(self.line(step, rows, epoch=epoch))
            if step < target:
                truth[epoch] |= set(rows)
        panel.rewind(target)
        epoch = int(target >= epoch_at)
        probe = self.line(target, list(range(61)), epoch=epoch)
        context = RunContext()
        context.see_step(probe)
        panel.repeated.findings.kept.clear()
        panel.repeated.parts()["memory"].alarm = None  # a new episode, not one that goes on
        panel.repeated.on_step(probe, context)
        found = [f.values["samples_repeated"] for f in panel.repeated.reported()]
        assert found == ([len(truth[epoch])] if truth[epoch] else [])

    def test_a_snapshot_does_not_grow_with_the_samples_of_the_run(self) -> None:
        panel = self.panel()
        sizes = []
        for step in range(40):
            if step % 10 == 0:
                panel.snapshot(step)
                sizes.append(len(panel.snapshots[-1].state))
            panel.see_step(self.line(step, range(5000 * step, 5000 * step + 5000)))
        assert max(sizes) < 40_000

    def test_epochs_that_no_snapshot_can_reach_are_forgotten(self) -> None:
        detector = RepeatedData()
        for epoch in range(4):
            detector.on_step(self.line(epoch, [epoch], epoch=epoch), RunContext())
        detector.forget_epochs_before(2)
        assert sorted(detector.parts()["memory"].seen) == [2, 3]

    def test_a_stretch_with_an_id_beyond_64_bits_is_judged_record_by_record(self) -> None:
        detector = RepeatedData()
        assert detector.on_stretch([self.line(0, [1, 2**80])], RunContext()) == 0
        detector.on_step(self.line(0, [1, 2**80]), RunContext())
        assert detector.on_stretch([self.line(1, [2])], RunContext()) == 1


class TestSeen:
    @settings(max_examples=amount(20, full=40), deadline=None, derandomize=True)
    @given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 5000), min_size=1, max_size=9)), max_size=20))
    def test_adding_and_taking_out_is_that_of_a_set(self, moves: list[tuple[bool, list[int]]]) -> None:
        seen, truth = Seen(), set[int]()
        for adds, rows in moves:
            if adds:
                is_new = len(set(rows)) == len(rows) and truth.isdisjoint(rows)
                assert seen.add_new(rows) == is_new
                truth |= set(rows) if is_new else set()
            else:
                seen.discard(np.array(rows, dtype=np.int32))
                truth -= set(rows)
        everything = list(range(5001))
        assert Seen.of_text(seen.text()).add_all(everything) == sorted(truth)

    def test_what_can_be_no_sample_takes_no_memory(self) -> None:
        seen = Seen()
        assert seen.add_all([-1, MAX_SAMPLE, 2**62, 7]) == []
        assert seen.add_all([7, -1, 2**62, 2**80]) == [7]
        assert not seen.add_new([8, 2**80])
        assert len(seen.text()) < 200
        assert Taken.of(0, [-1, 3, 2**62]).rows().tolist() == [3]
