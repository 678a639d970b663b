"""The logged learning rate against the configured schedule.

The hard decision: an independent second formula, compared with one step of slack and a tolerance, because the point
is to catch a trainer whose own formula is wrong; equality to the last bit would only test rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dflash.config import HealthConfig, TrainConfig
from dflash.health.context import RunContext
from dflash.health.detectors.base import Detector, Memory
from dflash.health.lines import StepLine
from dflash.records import LrOverlay
from dflash.rollback import lr_factor


class ScheduleMemory(Memory):
    """The mismatch that may still grow."""

    open_mismatch: int | None = None


class Schedule(Detector):
    """Learning rate other than the schedule's."""

    name = "lr mismatch"
    domain = "training"
    _memory: ScheduleMemory

    def __init__(self, health: HealthConfig, train: TrainConfig) -> None:
        super().__init__(ScheduleMemory())
        self._train = train
        self._tolerance = health.lr_tolerance_frac

    def rule(self) -> str:
        """The rule with its thresholds."""
        return (
            f"learning rate off the schedule ({self._train.schedule}, peak {self._train.lr:g}) by more than "
            f"{100 * self._tolerance:g} % of the peak"
        )

    def note(self) -> str:
        """What limits or explains this check."""
        return "" if self.checked else "not checked: the log does not say how many steps the schedule is laid out for"

    def on_stretch(self, records: Sequence[StepLine], context: RunContext, /) -> int:
        """Judge consecutive records; only events change the schedule."""
        total, overlay = context.total_steps, context.overlay
        if total is not None:
            self.checked += len(records)
            slack, train = self._tolerance * self._train.lr, self._train
            for record in records:
                scheduled = scheduled_lr(train, record.step, total=total)
                if overlay is not None:
                    scheduled *= lr_factor(overlay, step=record.step)
                if abs(record.lr - scheduled) > slack or self._memory.open_mismatch is not None:
                    self._compare(record, total, context)
        return len(records)

    def _compare(self, record: StepLine, total: int, context: RunContext) -> None:
        memory = self._memory
        scheduled = self._expected(record.step, total, context.overlay)
        if self._agrees(record, scheduled, total=total, overlay=context.overlay):
            if memory.open_mismatch is not None:
                self.findings.amend(memory.open_mismatch, resolved_step=record.step)
                memory.open_mismatch = None
            return
        if memory.open_mismatch is not None:
            self.findings.amend(memory.open_mismatch, last_step=record.step)
            return
        memory.open_mismatch = self._finding(
            "warn",
            f"learning rate {record.lr:.4g} at step {record.step}, the schedule says {scheduled:.4g}",
            steps=(record.step, record.step, record.step),
            lr=record.lr,
            scheduled_lr=scheduled,
        )

    def _expected(self, step: int, total: int, overlay: LrOverlay | None) -> float:
        return scheduled_lr(self._train, step, total=total) * lr_factor(overlay, step=step)

    def _agrees(self, record: StepLine, scheduled: float, *, total: int, overlay: LrOverlay | None) -> bool:
        slack = self._tolerance * self._train.lr
        if abs(record.lr - scheduled) <= slack:
            return True
        beside = [self._expected(step, total, overlay) for step in (record.step - 1, record.step + 1)]
        return min(beside) - slack <= record.lr <= max(beside) + slack


def scheduled_lr(train: TrainConfig, step: int, *, total: int) -> float:
    """Learning rate of update `step` (0-based) of `total`: linear warm-up lr*(step+1)/warmup, then the shape."""
    step = min(max(step, 0), total - 1)
    warmup = round(train.warmup_frac * total)  # whole steps: in a warm-up of three, half a step is a lot
    if step + 1 < warmup:
        return train.lr * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1.0, total - warmup)) if step > warmup else 0.0
    if train.schedule == "wsd":
        # Whole steps: near the end of 1 - sqrt(progress) half a step is much.
        decay_steps = min(total - warmup, round(train.decay_frac * total))
        shape = 1 - math.sqrt(max(0.0, 1 - (total - step) / max(1, decay_steps)))
    elif train.schedule == "cosine":
        shape = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        shape = 1 - progress if train.schedule == "linear" else 1.0
    return train.lr * (train.min_lr_frac + (1 - train.min_lr_frac) * shape)
