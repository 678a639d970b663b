"""What a run's own noise excuses, and what it does not: spikes among hard batches, sensors that stand still, chance among many."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from dflash.config import RiseConfig, SpikeConfig, WatchConfig
from dflash.health.context import RunContext
from dflash.health.detectors import AccuracyDrop, GradSpike, LossSpike, SaveCorrelation, ShareDrift, SustainedRise
from dflash.health.lines import StepLine
from dflash.records import Finding
from tests.support.health_lines import event_line, feed, micro, step_line

WATCH, SPIKE, RISE = WatchConfig(), SpikeConfig(), RiseConfig()
STEPS = 1400
NOISE = np.exp(0.1 * np.random.default_rng(5).standard_normal(STEPS))
GRADS = np.exp(0.14 * np.random.default_rng(6).standard_t(6, STEPS))
HARD = np.random.default_rng(7).random(STEPS) < 0.08


def curve(change: Callable[[int], tuple[float, float]], *, hard: bool = True) -> list[StepLine]:
    """A run of one bucket; `change` gives factors of loss and gradient norm, and every twelfth batch is three times as hard."""
    lines = []
    for step in range(STEPS):
        loss, grad = change(step)
        loss *= float(NOISE[step]) * (3.0 if hard and HARD[step] else 1.0)
        lines.append(step_line(step, ce=loss, micro_batches=[micro(step, loss=loss)], grad_norm=grad * float(GRADS[step])))
    return lines


def spikes_in(lines: list[StepLine]) -> list[Finding]:
    """What the gradient and loss detectors say of a run, criticals first."""
    context = RunContext()
    gradient, loss = GradSpike(SPIKE), LossSpike(SPIKE, RISE)
    for line in lines:
        context.see_step(line)
        gradient.on_step(line, context)
        loss.on_step(line, context)
        context.judged.clear()
    return sorted(loss.reported(), key=lambda f: (f.severity, f.first_step))


def at(steps: list[int], loss: float, grad: float) -> Callable[[int], tuple[float, float]]:
    return lambda step: (loss, grad) if step in steps else (1.0, 1.0)


def calm_steps(first: int, *gaps: int) -> list[int]:
    """Steps near the given ones that are not hard by nature."""
    wanted = [first + gap for gap in gaps]
    return [next(step for step in range(want, STEPS) if not HARD[step]) for want in wanted]


def test_hard_batches_alone_are_noted_and_not_warned_of() -> None:
    found = spikes_in(curve(lambda _step: (1.0, 1.0)))
    late = [f for f in found if f.first_step > 400]
    assert len(late) > 30
    assert {f.severity for f in late} == {"info"}


def test_a_spike_beyond_the_hump_of_hard_batches_is_a_warning() -> None:
    (step,) = calm_steps(1000, 0)
    loud = [f for f in spikes_in(curve(at([step], 7.0, 7.0))) if f.severity == "warn" and f.first_step > 400]
    assert [f.first_step for f in loud] == [step]


def test_three_spikes_with_hard_batches_between_them_are_damage() -> None:
    steps = calm_steps(1000, 0, 7, 14)
    first = spikes_in(curve(at(steps, 7.0, 7.0)))[0]
    assert (first.severity, first.onset_step, first.last_step) == ("critical", steps[0], steps[-1])


def test_three_spikes_each_too_usual_to_be_warned_of_are_no_chance_together() -> None:
    steps = calm_steps(1000, 0, 7, 14)
    weak = at(steps, 5.5, 3.0)
    alone = spikes_in(curve(at(steps[:1], 5.5, 3.0)))
    assert [f.severity for f in alone if f.first_step == steps[0]] == ["info"]
    together = spikes_in(curve(weak))[0]
    assert (together.severity, together.onset_step) == ("critical", steps[0])
    assert together.values["chance_p"] < SPIKE.chance_p / 100


def test_a_high_loss_whose_gradient_is_usual_has_to_be_rarer() -> None:
    (step,) = calm_steps(1000, 0)
    factor = 1.85
    led = spikes_in(curve(at([step], factor, 4.0), hard=False))
    alone = spikes_in(curve(at([step], factor, 1.0), hard=False))
    assert [f.severity for f in led if f.first_step == step] == ["warn"]
    assert [f.severity for f in alone if f.first_step == step] in ([], ["info"])


def test_a_log_without_gradients_is_believed_sooner() -> None:
    (step,) = calm_steps(1000, 0)
    lines = curve(at([step], 2.0, 1.0), hard=False)
    bare = [msgspec.structs.replace(line, grad_norm=None) for line in lines]
    assert [f.severity for f in spikes_in(lines) if f.first_step == step] == ["info"]
    assert [f.severity for f in spikes_in(bare) if f.first_step == step] == ["warn"]


@pytest.mark.parametrize("value", [0.0, 0.31])
def test_a_gradient_norm_that_stands_still_is_no_level_for_what_follows(value: float) -> None:
    lines = [step_line(s, grad_norm=value if 300 <= s < 500 else float(GRADS[s])) for s in range(700)]
    detector = GradSpike(SPIKE)
    feed(detector, lines)
    assert detector.reported() == []


def test_a_change_that_was_declared_explains_a_rise_dated_ahead_of_it() -> None:
    rng = np.random.default_rng(3)
    # A swell that is no damage keeps the sum up from step 700 on; the declared change makes the rise.
    level = [1.0 if s < 700 else 1.09 if s < 900 else 1.09 * 1.3 for s in range(1100)]
    lines: list[StepLine] = []
    for s in range(1100):
        loss = level[s] * float(np.exp(0.05 * rng.standard_normal()))
        lines.append(step_line(s, ce=loss, micro_batches=[micro(s, loss=loss)]))

    def said(*, declared: bool) -> list[Finding]:
        context = RunContext()
        loss, rise = LossSpike(SPIKE, RISE), SustainedRise(RISE)
        for line in lines:
            if declared and line.step == 900:
                context.see_event(event_line("epoch", 900))
            context.see_step(line)
            loss.on_step(line, context)
            rise.on_step(line, context)
            context.judged.clear()
        return rise.reported()

    assert [f.severity for f in said(declared=True)] in ([], ["info"])
    assert [f.severity for f in said(declared=False)] == ["critical"]


def test_drops_that_a_bucket_has_all_the_time_are_not_measured_by_the_others() -> None:
    rng = np.random.default_rng(4)

    def lines(steps: int, collapse: range) -> list[StepLine]:
        made = []
        for s in range(steps):
            bucket = s % 4
            low = s in collapse or (bucket == 0 and rng.random() < 0.15)
            hits = int(rng.binomial(400, 0.08 if low else 0.45))
            made.append(step_line(s, micro_batches=[micro(s, bucket=bucket, n_tokens=400, hits=hits)]))
        return made

    usual, collapsed = AccuracyDrop(WATCH), AccuracyDrop(WATCH)
    feed(usual, lines(6000, range(0)))
    assert usual.reported() == []
    feed(collapsed, lines(3000, range(2000, 2200)))
    assert {f.bucket for f in collapsed.reported()} == {0, 1, 2, 3}
    assert all(2000 <= f.first_step < 2010 for f in collapsed.reported())


def test_a_share_learnt_from_an_unlucky_beginning_is_no_drift() -> None:
    # 7 % true: 4 % in the 512 batches of the beginning, 13 % in one window of 256 behind it.
    counts = [(512, 0.043), (256, 0.13), (256, 0.07)]
    buckets = [int(i < share * size) for size, share in counts for i in range(size)]
    detector = ShareDrift(WATCH)
    feed(detector, [step_line(s, micro_batches=[micro(s, bucket=bucket)]) for s, bucket in enumerate(buckets)])
    assert detector.reported() == []


@pytest.mark.parametrize(("grad_z", "linked"), [(12.0, True), (0.5, False)])
def test_saves_are_linked_by_spikes_whose_gradient_stands_out_as_well(grad_z: float, linked: bool) -> None:
    detector, context = SaveCorrelation(WATCH), RunContext()
    for step in range(2000):
        if step and step % 200 == 0:
            detector.on_event(event_line("save_begin", step))
        context.see_step(step_line(step))
        near = step >= 200 and step % 200 == 3
        if near or step % 17 == 8:  # hard batches everywhere, noted like the others
            context.last_rise = step
            context.recent[-1].stands_out(grad_z if near else 0.5, chance=None)
        detector.on_step(step_line(step), context)
    assert detector.is_proven() == linked
