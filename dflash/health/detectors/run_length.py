"""Runs of one bucket in consumption order: long homogeneous stretches move the weights one way and back.

The hard decision: the order is judged from the log, not from the plan, because skips and resumes change it; and a
run that no order could avoid (one bucket holds most batches) is reported as a fact, not as a fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from dflash.config import HealthConfig
from dflash.health.context import RunContext
from dflash.health.detectors.base import Detector, Memory
from dflash.health.lines import EventLine, StepLine
from dflash.records import Finding

_KEPT_IDS = 64


class RunLengthMemory(Memory):
    """The run in progress, the longest one, and how often each bucket was consumed."""

    bucket: int | None = None
    length: int = 0
    first_step: int = 0
    batch_ids: list[int] = msgspec.field(default_factory=list)
    open_run: int | None = None
    longest: int = 0
    longest_step: int = 0
    per_bucket: dict[int, int] = msgspec.field(default_factory=dict)


class RunLength(Detector):
    """More consecutive micro-batches of one bucket than are harmless."""

    name = "bucket run"
    domain = "training"
    _memory: RunLengthMemory

    def __init__(self, health: HealthConfig) -> None:
        super().__init__(RunLengthMemory())
        self._limit = health.bucket_run

    def rule(self) -> str:
        """The rule with its thresholds."""
        return f"more than {self._limit} consecutive micro-batches of one bucket in consumption order"

    def note(self) -> str:
        """What limits or explains this check."""
        memory = self._memory
        return f"longest run: {memory.longest}, from step {memory.longest_step}" if memory.longest else ""

    @property
    def longest(self) -> int:
        """Longest run seen, in micro-batches."""
        return self._memory.longest

    def unavoidable(self) -> int:
        """Run length that the best possible order of the batches seen so far could not stay under."""
        counts = self._memory.per_bucket.values()
        most = max(counts, default=0)
        return -(-most // (sum(counts) - most + 1))

    def on_event(self, event: EventLine) -> None:
        """Judge an event."""
        # Positions left out of the plan join two stretches, which is not the plan's run; an update that was only not
        # applied (it names what was not finite) did consume its batches.
        if event.event == "skip" and "nonfinite" not in event.details:
            self._memory.bucket = None

    def on_stretch(self, records: Sequence[StepLine], _context: RunContext, /) -> int:
        """Judge consecutive records."""
        memory, limit = self._memory, self._limit
        longest, ids = memory.longest, memory.batch_ids
        for record in records:
            for batch in record.micro_batches:
                if batch.bucket != memory.bucket:
                    memory.bucket, memory.length, memory.first_step = batch.bucket, 1, record.step
                    memory.batch_ids = ids = [batch.batch_id]
                    memory.open_run = None
                else:
                    memory.length += 1
                    if len(ids) < _KEPT_IDS:
                        ids.append(batch.batch_id)
                length = memory.length
                if length > longest:
                    longest = memory.longest = length
                    memory.longest_step = memory.first_step
                if length > limit:
                    self._extend(record.step)
        for bucket, batches in Counter([batch.bucket for record in records for batch in record.micro_batches]).items():
            memory.per_bucket[bucket] = memory.per_bucket.get(bucket, 0) + batches
            self.checked += batches
        return len(records)

    def _extend(self, step: int) -> None:
        memory = self._memory
        message = f"{memory.length} micro-batches of bucket {memory.bucket} in a row from step {memory.first_step}"
        ids = tuple(memory.batch_ids)
        if memory.open_run is not None:
            self.findings.amend(memory.open_run, last_step=step, message=message, batch_ids=ids, length=memory.length)
            return
        memory.open_run = self._finding(
            "warn",
            message,
            steps=(memory.first_step, memory.first_step, step),
            bucket=memory.bucket,
            batch_ids=ids,
            length=memory.length,
        )

    def reported(self) -> list[Finding]:
        """Findings as they stand now."""
        limit = self.unavoidable()
        return [
            replace(f, severity="info", message=f"{f.message}; unavoidable with this mix of buckets")
            if int(f.values["length"]) <= limit
            else f
            for f in super().reported()
        ]
