"""After a resume: whether training goes on from the state it left, and whether any sample comes twice in its epoch.

The hard decision: what was consumed is kept as one bit a sample, so it is exact and small, and once, not in every snapshot:
going back gives back, one by one, the samples that the abandoned records had consumed.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dflash.config import WatchConfig
from dflash.health.baseline import Level
from dflash.health.context import Judged, RunContext
from dflash.health.detectors.base import Detector, Memory
from dflash.health.lines import StepLine
from dflash.health.seen import MAX_SAMPLE, Seen, samples_of

_CLIP_Z = 6.0
_NEWEST = 10
_MAX_KEPT_SAMPLES = 32


class Taken(msgspec.Struct, frozen=True, array_like=True):
    """Samples of one epoch, packed."""

    epoch: int
    packed: bytes

    @classmethod
    def of(cls, epoch: int, rows: Collection[int]) -> Taken:
        """Pack samples; what cannot be a sample is left out, as it is by the set itself."""
        return cls(epoch, np.array([row for row in rows if 0 <= row < MAX_SAMPLE], dtype=np.int32).tobytes())

    def rows(self) -> npt.NDArray[np.int32]:
        """The samples."""
        return np.frombuffer(self.packed, dtype=np.int32)


class RepeatMemory(Memory):
    """Samples consumed, by epoch (the newest, and those that a snapshot may go back to), and the episode that may grow."""

    epoch: int = 0
    seen: dict[int, Seen] = msgspec.field(default_factory=lambda: {0: Seen()})
    alarm: int | None = None
    repeated: int = 0


class RepeatedData(Detector):
    """A sample that a live record of the same epoch has consumed already.

    Attributes:
        taken: samples consumed since the newest snapshot, to be given back by a way back.
    """

    name = "repeated data"
    domain = "training"
    _memory: RepeatMemory

    def __init__(self) -> None:
        super().__init__(RepeatMemory())
        self.taken: list[Taken] = []

    def rule(self) -> str:
        """The rule with its thresholds."""
        return "no sample is consumed twice in one epoch, also across resumes; records that a rollback abandoned do not count"

    @property
    def epoch(self) -> int:
        """The epoch whose samples are being consumed."""
        return self._memory.epoch

    def light_parts(self) -> dict[str, Any]:
        """All but the samples, which a way back takes out one by one: a snapshot must not grow with the run."""
        memory = self._memory
        kept = {"epoch": memory.epoch, "alarm": memory.alarm, "repeated": memory.repeated}
        return {**self.parts(), "memory": kept}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go (back) to a state; one made of light parts leaves the samples as they are, see `give_back`."""
        seen = self._memory.seen
        super().load(state)
        if "seen" not in state["memory"]:
            self._memory.seen = seen

    def give_back(self, taken: Sequence[Taken]) -> None:
        """Forget samples that were consumed behind a snapshot which has been loaded."""
        memory = self._memory
        for each in taken:
            if each.epoch in memory.seen:
                memory.seen[each.epoch].discard(each.rows())
        memory.seen = {epoch: seen for epoch, seen in memory.seen.items() if epoch <= memory.epoch}
        memory.seen.setdefault(memory.epoch, Seen())
        self.taken = []

    def forget_epochs_before(self, epoch: int) -> None:
        """No way back leads to an earlier epoch any more."""
        for old in [each for each in self._memory.seen if each < epoch]:
            del self._memory.seen[old]

    def on_stretch(self, records: Sequence[StepLine], _context: RunContext, /) -> int:
        """Judge all records at once if they belong to the current epoch and repeat nothing, else none of them."""
        memory = self._memory
        batches = [batch for record in records for batch in record.micro_batches if batch.rows]
        if {batch.epoch for batch in batches} - {memory.epoch}:
            return 0
        rows = samples_of(chain.from_iterable([batch.rows for batch in batches]))
        if rows is None:
            return 0
        if len(rows):
            if not memory.seen[memory.epoch].add_new(rows):
                return 0
            self.taken.append(Taken(memory.epoch, rows.astype(np.int32).tobytes()))
            self.checked += len(rows)
        return len(records)

    def on_step(self, record: StepLine, context: RunContext, /) -> None:
        """Judge a live step record."""
        memory = self._memory
        for batch in record.micro_batches:
            rows = batch.rows
            if not rows:
                continue
            if batch.epoch != memory.epoch:
                if batch.epoch < memory.epoch:
                    continue  # the last batches of an epoch that is over
                memory.epoch, memory.alarm = batch.epoch, None
                memory.seen[batch.epoch] = Seen()
            self.checked += len(rows)
            again = memory.seen[memory.epoch].add_all(rows)
            self.taken.append(Taken.of(memory.epoch, set(rows).difference(again)))
            if again:
                self._again(again, record, context)

    def _again(self, again: list[int], record: StepLine, context: RunContext) -> None:
        memory = self._memory
        if memory.alarm is not None:
            memory.repeated += len(again)
            self.findings.amend(memory.alarm, last_step=record.step, samples_repeated=memory.repeated)
            return
        memory.repeated = len(again)
        memory.alarm = self._alarm(
            f"{len(again)} samples of step {record.step} were already consumed in epoch {memory.epoch}",
            onset=record.step,
            record=record,
            context=context,
            bucket=None,
            epoch=memory.epoch,
            samples=again[:_MAX_KEPT_SAMPLES],
            samples_repeated=len(again),
        )


class ResumeMemory(Memory):
    """Levels as they stood at the resume, and the deviations from them since."""

    from_step: int | None = None
    references: dict[int, Level] = msgspec.field(default_factory=dict)
    deviations: list[float] = msgspec.field(default_factory=list)
    alarm: int | None = None


class BadResume(Detector):
    """Loss far off, in every bucket, right after a resume."""

    name = "bad resume"
    follows = True
    domain = "training"
    _memory: ResumeMemory

    def __init__(self, watch: WatchConfig) -> None:
        super().__init__(ResumeMemory())
        self._watch = watch

    def rule(self) -> str:
        """The rule with its thresholds."""
        w = self._watch
        return (
            f"mean deviation over {w.resume_z:g} of at least {w.resume_points} micro-batches in the first {w.resume_steps} steps "
            "after a resume, against the levels before it; far under them only with repeated data, which is judged by itself"
        )

    def on_new_process(self) -> None:
        """A resume: compare what follows with what was."""
        memory = self._memory
        memory.from_step, memory.references, memory.deviations, memory.alarm = -1, {}, [], None

    def on_stretch(self, records: Sequence[StepLine], context: RunContext, /) -> int:
        """Judge consecutive records; nothing is compared long after a resume."""
        for record, points in zip(records, context.judged, strict=False):
            if self._memory.from_step is None:
                break
            self._compare(record, points, context)
        return len(records)

    def _compare(self, record: StepLine, points: Sequence[Judged], context: RunContext) -> None:
        memory, watch = self._memory, self._watch
        if memory.from_step is None or memory.from_step < 0:
            memory.from_step = record.step
        if record.step - memory.from_step >= watch.resume_steps:
            memory.from_step, memory.references, memory.deviations = None, {}, []
            return
        for judged in points:
            self.checked += 1
            level = memory.references.setdefault(judged.batch.bucket, judged.level)
            z = level.z(judged.value, judged.batch.n_tokens)
            memory.deviations.append(min(max(z, -_CLIP_Z), _CLIP_Z))
        if memory.alarm is not None:
            self.findings.amend(memory.alarm, last_step=record.step)
        elif len(memory.deviations) >= watch.resume_points:
            mean = statistics.fmean(memory.deviations)
            if mean > watch.resume_z and statistics.fmean(memory.deviations[-_NEWEST:]) > watch.resume_z:
                memory.alarm = self._alarm(
                    f"loss is {mean:.1f} deviations above its usual since the resume at step {memory.from_step}",
                    onset=memory.from_step,
                    record=record,
                    context=context,
                    bucket=None,
                    mean_z=round(mean, 3),
                    points=len(memory.deviations),
                )
