"""Step integrity: whether the log is the complete, ordered record of one trainer.

The hard decision: a broken order is a finding of operations, not of training. It says that the log cannot be judged
(two writers, a restart without a new segment), not that the weights are damaged; the verdict is then `blind`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import sub

from dflash.health.context import RunContext
from dflash.health.detectors.base import Detector, Memory
from dflash.health.lines import EventLine, LogReplaced, StepLine, TornLine
from dflash.health.live import Arrival


class IntegrityMemory(Memory):
    """The newest torn line, and the findings that may still grow."""

    last_torn: TornLine | None = None
    torn_finding: int | None = None
    open_disorder: int | None = None
    last_mono_s: float | None = None
    torn_lines: int = 0


class Integrity(Detector):
    """Gaps, duplicates, steps out of order, unreadable lines, a clock that runs back, a log that was replaced."""

    name = "step integrity"
    domain = "operations"
    _memory: IntegrityMemory

    def __init__(self) -> None:
        super().__init__(IntegrityMemory())

    def rule(self) -> str:
        """The rule with its thresholds."""
        return (
            "every step once and in order; a gap, a duplicate, an unreadable line or a clock that runs back is a warning "
            "(a gap inside a save and a line cut off by a crash are noted), steps backwards without a new segment critical"
        )

    def note(self) -> str:
        """What limits or explains this check."""
        return f"{self._memory.torn_lines} unreadable lines" if self._memory.torn_lines else ""

    def on_new_process(self) -> None:
        """A line torn by the process that ended is explained by its end; clocks start anew."""
        memory = self._memory
        memory.last_mono_s = None
        memory.open_disorder = None

    def on_segment(self, segment: int, step: int) -> None:
        """A new segment begins at `step`: findings from there on rest on records that are no longer live."""
        torn = self._memory.last_torn
        if torn is not None and self._memory.torn_finding is not None:
            self.findings.remove(self._memory.torn_finding)
        self.findings.keep_before(step)
        if torn is not None:
            self._finding(
                "info",
                f"the line before segment {segment} was cut off when the trainer died ({torn.length_bytes} bytes)",
                steps=(step, step, step),
                offset=torn.offset,
            )
            self._memory.last_torn = self._memory.torn_finding = None

    def on_arrival(self, record: StepLine, arrival: Arrival, context: RunContext) -> None:
        """Judge how a record fits in; for every record, live or not."""
        self.checked += 1
        memory = self._memory
        memory.last_torn = memory.torn_finding = None
        step = record.step
        if arrival.missing is not None:
            self._gap(*arrival.missing, saving=bool(context.open_saves))
        if arrival.kind == "duplicate":
            self._finding("warn", f"step {step} is there twice; the first record counts", steps=(step, step, step))
        elif arrival.kind in ("backwards", "abandoned"):
            self._disorder(record, arrival)
        else:
            memory.open_disorder = None
            self._clocks((record,))

    def on_next(self, records: Sequence[StepLine]) -> None:
        """Judge records that each follow the one before."""
        self.checked += len(records)
        memory = self._memory
        memory.last_torn = memory.torn_finding = memory.open_disorder = None
        self._clocks(records)

    def _clocks(self, records: Sequence[StepLine]) -> None:
        now = [record.mono_time_s for record in records]
        before = [now[0] if self._memory.last_mono_s is None else self._memory.last_mono_s, *now[:-1]]
        for number, forth in enumerate(map(sub, now, before)):
            if forth < 0.0:
                step = records[number].step
                self._finding("warn", f"the monotonic clock runs back by {-forth:.3g} s at step {step}", steps=(step, step, step))
        self._memory.last_mono_s = now[-1]

    def on_torn(self, torn: TornLine, last_step: int) -> None:
        """Note a line that could not be read."""
        memory = self._memory
        memory.torn_lines += 1
        memory.last_torn = torn
        step = max(last_step, 0)
        memory.torn_finding = self._finding(
            "warn",
            f"an unreadable line of {torn.length_bytes} bytes behind step {step}: {torn.reason}",
            steps=(step, step, step),
            offset=torn.offset,
        )

    def on_replaced(self, replaced: LogReplaced, last_step: int) -> None:
        """Note that what had been read is no longer there."""
        step = max(last_step, 0)
        self._finding(
            "warn", f"the log was {replaced.reason} behind step {step}; it is read from its beginning", steps=(step, step, step)
        )

    def on_event(self, event: EventLine) -> None:
        """Records that the trainer itself dropped are missing, and it says so."""
        if event.event == "log_drops":
            self._finding("warn", f"the trainer dropped log records: {event.details}", steps=(event.step, event.step, event.step))

    def _gap(self, first: int, last: int, *, saving: bool) -> None:
        count = last - first + 1
        which = f"step {first} is" if count == 1 else f"steps {first} to {last} ({count}) are"
        self._finding(
            "info" if saving else "warn",
            f"{which} not in the log{', while a checkpoint was being saved' if saving else ''}",
            steps=(first, first, last),
            missing_steps=count,
            in_save=saving,
        )

    def _disorder(self, record: StepLine, arrival: Arrival) -> None:
        memory = self._memory
        if memory.open_disorder is not None:
            return
        what = (
            "goes backwards without a new segment"
            if arrival.kind == "backwards"
            else f"belongs to segment {record.segment}, which had ended"
        )
        memory.open_disorder = self._finding(
            "critical",
            f"step {record.step} {what}: two writers, or a restart that was not declared",
            steps=(record.step, record.step, record.step),
            alarm_step=record.step,
            segment=record.segment,
        )
