"""The simple rules that people judge a loss curve by, counted: how many records, in which buckets, the first and the last.

Invariant: a record is counted exactly as the plain rule counts it. Nothing here is a finding: the counts say what a
person has seen in the curve, the other detectors say what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import sub
from typing import Any

import msgspec

from dflash.config import HealthConfig
from dflash.health.context import RunContext
from dflash.health.detectors.base import Detector, Memory
from dflash.health.lines import StepLine


class Example(msgspec.Struct, frozen=True):
    """One counted record."""

    step: int
    value: float
    bucket: int | None


class Count(msgspec.Struct):
    """How often a rule fired, by bucket (of the first micro-batch), with the first and the last example."""

    records: int = 0
    per_bucket: dict[int, int] = msgspec.field(default_factory=dict)
    first: Example | None = None
    last: Example | None = None

    def add(self, record: StepLine, value: float) -> None:
        """Count one record."""
        bucket = record.micro_batches[0].bucket if record.micro_batches else None
        self.records += 1
        if bucket is not None:
            self.per_bucket[bucket] = self.per_bucket.get(bucket, 0) + 1
        self.last = Example(record.step, value, bucket)
        self.first = self.last if self.first is None else self.first


class SimpleMemory(Memory):
    """Counts of both rules, and the accuracy before."""

    records: int = 0
    loss_above: Count = msgspec.field(default_factory=Count)
    accuracy_drop: Count = msgspec.field(default_factory=Count)
    accuracy: float | None = None


class SimpleRules(Detector):
    """Loss above a fixed value, accuracy down by a fixed amount from one record to the next."""

    name = "simple rules"
    domain = "diagnosis"
    _memory: SimpleMemory

    def __init__(self, health: HealthConfig) -> None:
        super().__init__(SimpleMemory())
        self._loss, self._drop = health.simple_loss, health.simple_accuracy_drop

    def rule(self) -> str:
        """The rule with its thresholds."""
        return (
            f"loss above {self._loss:g}, accuracy down by over {self._drop:g} from one record to the next: counted, never acted on"
        )

    def note(self) -> str:
        """What limits or explains this check."""
        memory = self._memory
        return (
            f"{memory.loss_above.records} losses above, {memory.accuracy_drop.records} accuracy drops of {memory.records} records"
        )

    def on_stretch(self, records: Sequence[StepLine], _context: RunContext, /) -> int:
        """Count consecutive records."""
        memory, highest, drop = self._memory, self._loss, self._drop
        self.checked += len(records)
        memory.records += len(records)
        for record, ce in [(record, ce) for record in records if (ce := record.ce) is not None and ce > highest]:
            memory.loss_above.add(record, ce)
        now = [record.accuracy for record in records]
        before = [now[0] if memory.accuracy is None else memory.accuracy, *now[:-1]]
        for number, fall in enumerate(map(sub, before, now)):
            if fall > drop:
                memory.accuracy_drop.add(records[number], fall)
        memory.accuracy = now[-1]
        return len(records)

    def counts(self) -> dict[str, Any]:
        """Records of all, per cent, per bucket, first and last example of both rules."""
        memory = self._memory
        rules = (("loss_above", self._loss, memory.loss_above), ("accuracy_drop", self._drop, memory.accuracy_drop))
        return {
            name: {
                "limit": limit,
                "records": count.records,
                "of": memory.records,
                "percent": round(100 * count.records / memory.records, 3) if memory.records else 0.0,
                "per_bucket": {str(bucket): number for bucket, number in sorted(count.per_bucket.items())},
                "first": None if count.first is None else msgspec.to_builtins(count.first),
                "last": None if count.last is None else msgspec.to_builtins(count.last),
            }
            for name, limit, count in rules
        }
