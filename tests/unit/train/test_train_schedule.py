"""Learning rate and consumption of the plan."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import TrainConfig
from dflash.data.consumption import positions_to_consume
from dflash.health.detectors.schedule import scheduled_lr
from dflash.train.schedule import count_steps, deal_step, decay_start, lr_at, split_steps, warmup_factor, warmup_steps

PURE = settings(max_examples=200, deadline=None, derandomize=True)


def config(**changes: object) -> TrainConfig:
    return TrainConfig.model_validate({"lr": 2.0, "warmup_frac": 0.1, "min_lr_frac": 0.25} | changes)


def lr(train: TrainConfig, step: int, *, total: int = 100, scale: float = 1.0) -> float:
    return lr_at(train, step=step, total_steps=total, lr_scale=scale)


def test_the_warm_up_is_lr_times_step_plus_one_over_warm_up() -> None:
    train = config()
    assert warmup_steps(train, total_steps=100) == 10
    assert [lr(train, step) for step in range(10)] == pytest.approx([2.0 * (step + 1) / 10 for step in range(10)])
    assert lr(train, 10) == pytest.approx(2.0)
    assert warmup_factor(train, step=4, total_steps=100) == 0.5
    assert warmup_factor(train, step=50, total_steps=100) == 1.0


@pytest.mark.parametrize(
    ("schedule", "halfway", "near_the_end"),
    [("constant", 2.0, 2.0), ("linear", 2.0 * (0.25 + 0.75 * 0.5), 0.5), ("cosine", 2.0 * (0.25 + 0.75 * 0.5), 0.5)],
)
def test_the_shapes_go_from_peak_to_floor(schedule: str, halfway: float, near_the_end: float) -> None:
    train = config(schedule=schedule)
    assert lr(train, 55) == pytest.approx(halfway)
    assert lr(train, 100) == pytest.approx(near_the_end)
    assert lr(train, 10_000) == lr(train, 100), "past the end it stays at the floor"


@PURE
@given(
    st.sampled_from(["cosine", "linear", "constant"]),
    st.integers(1, 500),
    st.floats(0, 0.99),
    st.floats(0, 1),
    st.floats(0.1, 1),
)
def test_every_schedule_stays_between_zero_and_peak_and_falls_after_the_warm_up(
    schedule: str, total: int, warmup_frac: float, min_lr_frac: float, scale: float
) -> None:
    train = config(schedule=schedule, warmup_frac=warmup_frac, min_lr_frac=min_lr_frac)
    rates = [lr(train, step, total=total, scale=scale) for step in range(total)]
    warmup = warmup_steps(train, total_steps=total)
    assert all(0 <= rate <= 2.0 * scale * (1 + 1e-12) for rate in rates)
    assert all(later >= earlier for earlier, later in itertools.pairwise(rates[:warmup]))
    after = rates[warmup:]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in itertools.pairwise(after))
    assert all(rate >= 2.0 * scale * min_lr_frac * (1 - 1e-12) for rate in after)


@PURE
@given(st.integers(0, 60), st.sets(st.integers(0, 70), max_size=20), st.integers(1, 7), st.none() | st.integers(1, 30))
def test_steps_consume_every_position_that_is_not_skipped_exactly_once(
    batches: int, skipped: set[int], accumulation: int, max_steps: int | None
) -> None:
    steps = count_steps(batches, skipped=skipped, step_batches=accumulation, max_steps=max_steps)
    positions = positions_to_consume(batches, start=0, skipped=skipped)
    groups = list(split_steps(positions, step_batches=accumulation, steps=steps))
    assert len(groups) == steps
    consumed = [position for group in groups for position in group]
    wanted = [position for position in range(batches) if position not in skipped]
    limit = math.inf if max_steps is None else max_steps * accumulation
    assert consumed == wanted[: min(len(wanted), limit)]  # type: ignore[misc]
    assert all(len(group) == accumulation for group in groups[:-1])


@PURE
@given(st.integers(1, 60), st.sets(st.integers(0, 60), max_size=20), st.integers(1, 5), st.data())
def test_continuing_after_any_step_gives_the_steps_that_were_left(
    batches: int, skipped: set[int], accumulation: int, data: st.DataObject
) -> None:
    steps = count_steps(batches, skipped=skipped, step_batches=accumulation, max_steps=None)
    positions = positions_to_consume(batches, start=0, skipped=skipped)
    groups = [list(group) for group in split_steps(positions, step_batches=accumulation, steps=steps)]
    done = data.draw(st.integers(0, steps))
    plan_position = groups[done - 1][-1] + 1 if done else 0
    rest = positions_to_consume(batches, start=plan_position, skipped=skipped)
    again = split_steps(rest, step_batches=accumulation, steps=steps - done)
    assert [list(group) for group in again] == groups[done:]


@PURE
@given(st.lists(st.integers(1, 1000), max_size=24), st.integers(1, 6))
def test_a_step_is_dealt_completely_evenly_and_with_near_equal_costs(costs: list[int], ranks: int) -> None:
    dealt = deal_step(costs, ranks=ranks)
    assert len(dealt) == ranks
    assert sorted(index for own in dealt for index in own) == list(range(len(costs)))
    assert all(list(own) == sorted(own) and len(own) <= -(-len(costs) // ranks) for own in dealt)
    loads = [sum(costs[index] for index in own) for own in dealt]
    if len(costs) % ranks == 0:
        assert {len(own) for own in dealt} == {len(costs) // ranks}
        assert max(loads) - min(loads) <= max(costs, default=0)


def test_the_dearest_batches_go_to_different_ranks() -> None:
    assert deal_step([9, 1, 9, 1], ranks=2) == ((0, 1), (2, 3))
    assert deal_step([1, 1, 9, 9], ranks=2) == ((0, 2), (1, 3))
    assert deal_step([5], ranks=3) == ((0,), (), ())


@PURE
@given(st.integers(1, 400), st.floats(0, 0.5), st.floats(0.05, 1), st.floats(0, 0.5))
def test_wsd_warms_up_stays_and_decays_and_the_health_check_agrees(
    total: int, warmup_frac: float, decay_frac: float, floor: float
) -> None:
    train = TrainConfig(schedule="wsd", lr=2.0, warmup_frac=warmup_frac, decay_frac=decay_frac, min_lr_frac=floor)
    rates = [lr_at(train, step=step, total_steps=total, lr_scale=1.0) for step in range(total)]
    warmup, start = warmup_steps(train, total_steps=total), decay_start(train, total_steps=total)
    assert start is not None and warmup <= start <= total
    assert all(rate == 2.0 for rate in rates[warmup : start + 1])
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[start:]))
    assert all(rate >= 2.0 * floor for rate in rates[warmup:])
    if total - start >= 1:
        done = (total - 1 - start) / (total - start)
        assert rates[-1] == pytest.approx(2.0 * (floor + (1 - floor) * (1 - math.sqrt(done))))
    for step, rate in list(enumerate(rates))[warmup + 1 :]:
        beside = [scheduled_lr(train, step + shift, total=total) for shift in (-1, 0, 1)]
        assert min(beside) - 1e-9 <= rate <= max(beside) + 1e-9, step
