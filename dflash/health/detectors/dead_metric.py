"""Dead metrics: a number that no longer moves, or a gradient of exactly nothing, comes from a broken sensor.

The hard decision: only exact equality counts. A metric that barely moves is alive; one that repeats to the last bit
for `dead_records` records is not measured any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import eq

import msgspec

from dflash.config import WatchConfig
from dflash.health.context import RunContext
from dflash.health.detectors.base import Detector, Memory
from dflash.health.lines import StepLine


class Held(msgspec.Struct):
    """One metric: its last value, since when and how often it has been the same."""

    value: float | None = None
    since: int = 0
    records: int = 0
    finding: int | None = None


class DeadMemory(Memory):
    """The metrics, and the stretch without any gradient."""

    ce: Held = msgspec.field(default_factory=Held)
    accuracy: Held = msgspec.field(default_factory=Held)
    grad_norm: Held = msgspec.field(default_factory=Held)
    zero: int | None = None


class DeadMetric(Detector):
    """A metric without any variance, or a gradient norm of exactly zero."""

    name = "dead metric"
    domain = "operations"
    _memory: DeadMemory

    def __init__(self, watch: WatchConfig) -> None:
        super().__init__(DeadMemory())
        self._records = watch.dead_records

    def rule(self) -> str:
        """The rule with its thresholds."""
        return f"loss, accuracy or gradient norm exactly the same for {self._records} records, or a gradient norm of exactly zero"

    def on_stretch(self, records: Sequence[StepLine], _context: RunContext, /) -> int:
        """Judge consecutive records."""
        memory = self._memory
        self.checked += len(records)
        losses, hits = [record.ce for record in records], [record.accuracy for record in records]
        norms = [record.grad_norm for record in records]
        moving = _moves(memory.ce, losses) and _moves(memory.accuracy, hits) and _moves(memory.grad_norm, norms)
        if moving and 0.0 not in norms and memory.zero is None:  # nearly always
            memory.ce.value, memory.accuracy.value, memory.grad_norm.value = losses[-1], hits[-1], norms[-1]
        else:
            for record in records:
                self._judge(record)
        return len(records)

    def _judge(self, record: StepLine) -> None:
        memory = self._memory
        metrics = (("loss", memory.ce, record.ce), ("accuracy", memory.accuracy, record.accuracy))
        for name, held, value in (*metrics, ("gradient norm", memory.grad_norm, record.grad_norm)):
            if value == held.value or held.records:
                self._same(name, held, value, record.step)
            held.value = value
        if record.grad_norm == 0.0 or memory.zero is not None:
            self._nothing(record)

    def _same(self, name: str, held: Held, value: float | None, step: int) -> None:
        if value != held.value or value is None:
            if held.finding is not None:
                self.findings.amend(held.finding, resolved_step=step)
            held.records, held.finding = 0, None
            return
        if not held.records:
            held.since, held.records = step - 1, 1
        held.records += 1
        if held.finding is not None:
            self.findings.amend(held.finding, last_step=step, records=held.records)
        elif held.records >= self._records:
            held.finding = self._finding(
                "warn",
                f"{name} has been exactly {value:g} since step {held.since}: it is not measured any more",
                steps=(held.since, held.since, step),
                metric=name,
                records=held.records,
            )

    def _nothing(self, record: StepLine) -> None:
        memory, step = self._memory, record.step
        if record.grad_norm != 0.0:
            if memory.zero is not None:
                self.findings.amend(memory.zero, resolved_step=step)
            memory.zero = None
        elif memory.zero is not None:
            self.findings.amend(memory.zero, last_step=step)
        else:
            memory.zero = self._finding(
                "warn",
                f"gradient norm exactly zero at step {step}: the update changes nothing",
                steps=(step, step, step),
                metric="zero",
            )


def _moves(held: Held, values: Sequence[float | None]) -> bool:
    """Whether a metric that moved so far never has one value twice in a row."""
    return not held.records and values[0] != held.value and not any(map(eq, values, values[1:]))
