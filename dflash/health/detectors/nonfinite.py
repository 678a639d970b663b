"""Non-finite numbers: no warm-up, no baseline, judged from the first record on.

The hard decision: an update that was applied although something was not finite is damage at once; one that the
trainer skipped left the weights alone, so a single one is a warning and only their frequency is damage.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dflash.config import HealthConfig
from dflash.health.context import RunContext
from dflash.health.detectors.base import Detector, Memory
from dflash.health.lines import StepLine


class NonFiniteMemory(Memory):
    """Recent skipped steps and the numbers of the findings that may still grow."""

    skips: list[int] = msgspec.field(default_factory=list)
    open_skip: int | None = None
    last_bad: int | None = None
    alarm: int | None = None


class NonFinite(Detector):
    """NaN or infinite loss, gradient norm, weight or moment."""

    name = "non-finite"
    domain = "training"
    _memory: NonFiniteMemory

    def __init__(self, health: HealthConfig) -> None:
        super().__init__(NonFiniteMemory())
        self._skips = health.nonfinite_skips
        self._window = health.nonfinite_window_steps

    def rule(self) -> str:
        """The rule with its thresholds."""
        return (
            f"any NaN or infinity; a step that was skipped for it is a warning, {self._skips} skipped steps in {self._window} "
            "or one that was applied are critical"
        )

    def on_stretch(self, records: Sequence[StepLine], _context: RunContext, /) -> int:
        """Judge finite records while nothing is open, and return how many."""
        memory = self._memory
        if memory.skips or memory.open_skip is not None or memory.alarm is not None:
            return 0
        finite = next((number for number, record in enumerate(records) if record.nonfinite), len(records))
        self.checked += finite
        return finite

    def on_step(self, record: StepLine, context: RunContext, /) -> None:
        """Judge a live step record."""
        self.checked += 1
        memory = self._memory
        self._settle(record.step)
        if not record.nonfinite:
            return
        consecutive = memory.last_bad == record.step - 1
        memory.last_bad = record.step
        if not record.skipped:
            self._damage(record, context, onset=record.step, what="the update was applied to the weights")
            return
        memory.skips.append(record.step)
        self._warn(record, consecutive=consecutive)
        if len(memory.skips) >= self._skips:
            self._damage(
                record, context, onset=memory.skips[0], what=f"{len(memory.skips)} updates skipped in {self._window} steps"
            )

    def _settle(self, step: int) -> None:
        memory = self._memory
        while memory.skips and memory.skips[0] <= step - self._window:
            memory.skips.pop(0)
        if not memory.skips and memory.open_skip is not None:
            self.findings.amend(memory.open_skip, resolved_step=step)
            memory.open_skip = None
        if memory.last_bad is not None and memory.last_bad <= step - self._window:
            memory.alarm = None

    def _warn(self, record: StepLine, *, consecutive: bool) -> None:
        memory = self._memory
        names = ", ".join(record.nonfinite)
        if consecutive and memory.open_skip is not None:
            self.findings.amend(memory.open_skip, last_step=record.step)
            return
        if memory.open_skip is not None:
            self.findings.amend(memory.open_skip, resolved_step=record.step)
        memory.open_skip = self._finding(
            "warn",
            f"not finite at step {record.step}: {names}; the update was skipped",
            steps=(record.step, record.step, record.step),
            bucket=record.micro_batches[0].bucket if record.micro_batches else None,
            batch_ids=tuple(batch.batch_id for batch in record.micro_batches),
            nonfinite=list(record.nonfinite),
        )

    def _damage(self, record: StepLine, context: RunContext, *, onset: int, what: str) -> None:
        memory = self._memory
        if memory.alarm is not None:
            self.findings.amend(memory.alarm, last_step=record.step)
            return
        names = ", ".join(record.nonfinite)
        memory.alarm = self._alarm(
            f"not finite at step {record.step}: {names}; {what}",
            onset=onset,
            record=record,
            context=context,
            bucket=None,
            nonfinite=list(record.nonfinite),
            skipped=record.skipped,
        )
