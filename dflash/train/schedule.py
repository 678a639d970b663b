"""Learning rate and grouping of plan positions as pure functions of the step.

Invariant: nothing here has state, so a resumed run computes what the uninterrupted one would have.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence

from dflash.config import TrainConfig


def warmup_steps(train: TrainConfig, *, total_steps: int) -> int:
    """Optimizer steps of the linear warm-up."""
    return round(train.warmup_frac * total_steps)


def warmup_factor(train: TrainConfig, *, step: int, total_steps: int) -> float:
    """(step + 1) / warm-up steps while warming up, then 1."""
    warmup = warmup_steps(train, total_steps=total_steps)
    return (step + 1) / warmup if step < warmup else 1.0


def lr_at(train: TrainConfig, *, step: int, total_steps: int, lr_scale: float) -> float:
    """Learning rate of the update from state `step` to `step + 1`.

    Args:
        train: peak, shape, warm-up and floor.
        step: 0-based.
        total_steps: steps that the schedule is laid out for.
        lr_scale: overlay factor of the segment (1 = none).
    """
    factor = warmup_factor(train, step=step, total_steps=total_steps)
    if factor == 1.0:
        start = decay_start(train, total_steps=total_steps)
        start = warmup_steps(train, total_steps=total_steps) if start is None else start
        factor = _decay(train, done_frac=(step - start) / max(1, total_steps - start))
    return train.lr * factor * lr_scale


def _decay(train: TrainConfig, *, done_frac: float) -> float:
    done = min(max(done_frac, 0.0), 1.0)
    if train.schedule == "constant":
        return 1.0
    if train.schedule == "wsd":
        left = 1.0 - math.sqrt(done)
    else:
        left = 1.0 - done if train.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return train.min_lr_frac + (1.0 - train.min_lr_frac) * left


def decay_start(train: TrainConfig, *, total_steps: int) -> int | None:
    """First step of the `wsd` schedule's decay; None for the shapes without a stable part."""
    if train.schedule != "wsd":
        return None
    return max(warmup_steps(train, total_steps=total_steps), total_steps - round(train.decay_frac * total_steps))


def count_steps(batches: int, *, skipped: Collection[int], step_batches: int, max_steps: int | None) -> int:
    """Optimizer steps that a plan of `batches` micro-batches gives at `step_batches` each; the last one may hold fewer."""
    left = batches - sum(0 <= position < batches for position in set(skipped))
    steps = math.ceil(left / step_batches)
    return steps if max_steps is None else min(steps, max_steps)


def split_steps(positions: Sequence[int], *, step_batches: int, steps: int) -> Iterator[Sequence[int]]:
    """The positions of each of the next `steps` optimizer steps, made as they are asked for."""
    starts = range(0, len(positions), step_batches)[:steps]
    return (positions[start : start + step_batches] for start in starts)


def deal_step(costs: Sequence[int], *, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Deal one step's micro-batches to the ranks: equally many each, the dearest first to the rank that has least.

    The step's micro-batches are neighbours in the plan whatever the number of ranks, so the training is the same (up to rounding)
    and progress stays one position in the plan.

    Args:
        costs: [n] of the step's micro-batches, in plan order.
        ranks: R.

    Returns:
        [R] indices into `costs`, ascending; in a plan's last step some ranks may have one fewer, or none.
    """
    most = -(-len(costs) // ranks)
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    had = [0] * ranks
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        rank = min((rank for rank in range(ranks) if len(dealt[rank]) < most), key=lambda rank: (had[rank], len(dealt[rank]), rank))
        dealt[rank].append(index)
        had[rank] += costs[index]
    return tuple(tuple(sorted(own)) for own in dealt)


def waiting_frac(steps: Iterable[Sequence[int]], *, ranks: int) -> float:
    """Share of all ranks' time that they wait for the dearest one, if time is proportional to cost.

    Args:
        steps: of each step the costs of its micro-batches, in plan order.
        ranks: R.
    """
    worked = lasted = 0
    for costs in steps:
        shares = [sum(costs[index] for index in own) for own in deal_step(costs, ranks=ranks)]
        worked += sum(shares)
        lasted += ranks * max(shares)
    return 1.0 - worked / lasted if lasted else 0.0
