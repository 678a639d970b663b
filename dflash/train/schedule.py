"""Learning rate and grouping of plan positions as pure functions of the step.

Invariant: nothing here has state, so a resumed run computes what the uninterrupted one would have.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

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
        warmup = warmup_steps(train, total_steps=total_steps)
        factor = _decay(train, done_frac=(step - warmup) / max(1, total_steps - warmup))
    return train.lr * factor * lr_scale


def _decay(train: TrainConfig, *, done_frac: float) -> float:
    done = min(max(done_frac, 0.0), 1.0)
    if train.schedule == "constant":
        return 1.0
    left = 1.0 - done if train.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return train.min_lr_frac + (1.0 - train.min_lr_frac) * left


def count_steps(batches: int, *, skipped: Collection[int], accumulation_steps: int, max_steps: int | None) -> int:
    """Optimizer steps that a plan of `batches` micro-batches gives; the last one may hold fewer micro-batches."""
    left = batches - sum(0 <= position < batches for position in set(skipped))
    steps = math.ceil(left / accumulation_steps)
    return steps if max_steps is None else min(steps, max_steps)


def split_steps(positions: Sequence[int], *, accumulation_steps: int, steps: int) -> Iterator[Sequence[int]]:
    """The positions of each of the next `steps` optimizer steps, made as they are asked for."""
    starts = range(0, len(positions), accumulation_steps)[:steps]
    return (positions[start : start + accumulation_steps] for start in starts)
