"""After a resume: whether training goes on from the state it left, and whether any sample comes twice in its epoch.

The hard decision: what was consumed is kept as one bit a sample, so it is exact, small, and part of every snapshot:
going back to a checkpoint gives back the samples that the abandoned records had consumed.
"""

from __future__ import annotations

import statistics

import msgspec

from dflash.config import WatchConfig
from dflash.health.baseline import Level
from dflash.health.context import RunContext
from dflash.health.detectors.base import Detector, Memory
from dflash.health.lines import StepLine
from dflash.health.seen import Seen

_CLIP_Z = 6.0
_NEWEST = 10
_MAX_KEPT_SAMPLES = 32


class RepeatMemory(Memory):
    """Samples consumed in the epoch, and the episode that may still grow."""

    epoch: int = 0
    seen: Seen = msgspec.field(default_factory=lambda: Seen(bytearray()))
    samples: int = 0
    alarm: int | None = None
    repeated: int = 0


class RepeatedData(Detector):
    """A sample that a live record of the same epoch has consumed already."""

    name = "repeated data"
    domain = "training"
    _memory: RepeatMemory

    def __init__(self) -> None:
        super().__init__(RepeatMemory())

    def rule(self) -> str:
        """The rule with its thresholds."""
        return "no sample is consumed twice in one epoch, also across resumes; records that a rollback abandoned do not count"

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
                memory.epoch, memory.seen, memory.alarm = batch.epoch, Seen(bytearray()), None
            self.checked += len(rows)
            again = memory.seen.add_all(rows)
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
    resumes: int = 0


class BadResume(Detector):
    """Loss far off, in every bucket, right after a resume."""

    name = "bad resume"
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
        memory.resumes += 1

    def on_step(self, record: StepLine, context: RunContext, /) -> None:
        """Judge a live step record."""
        memory, watch = self._memory, self._watch
        if memory.from_step is None:
            return
        if memory.from_step < 0:
            memory.from_step = record.step
        if record.step - memory.from_step >= watch.resume_steps:
            memory.from_step, memory.references, memory.deviations = None, {}, []
            return
        for judged in context.judged:
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
