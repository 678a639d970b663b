"""The run log as a timeline: what ran when, from what the log really holds.

Invariant: every span's begin and length are figures of the log, or the time between two of its lines; nothing is estimated, so
what the log does not place in time (the moments inside a target worker, the waits of other ranks) is a gauge or an argument and
never a span. Spans of one track do not overlap, but for one that lies inside another.

The hard decision: the clock. A machine's wall clock may be set while a run trains, its monotonic clock starts anew with every boot.
So the monotonic clock counts, laid over the wall clock at the log's first line, and again where a segment begins and the two have
parted by more than a minute: another boot, or another machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from dflash.errors import RunStateError
from dflash.records import SEGMENT_STARTS

RUN, EPOCHS, DRAFTER, CHECKPOINTS = "run", "epochs", "drafter (rank 0)", "checkpoint writer"
TRACKS: Final = (RUN, EPOCHS, DRAFTER, CHECKPOINTS)

ANOTHER_CLOCK_S: Final = 60.0
SHOWN_WAIT_S: Final = 1e-3
"""A shorter wait for features is an argument of its step and no span of its own: there would be one in every step."""

_BETWEEN = ("rollback_begin", "rollback_end", "acceptance_probe")
"""Written by the supervisor: no word of the trainer, so no part of its segment."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that lasted, in seconds since the log's first line."""

    track: str
    name: str
    begin_s: float
    length_s: float
    details: Mapping[str, Any]
    live: bool = True

    @property
    def end_s(self) -> float:
        """When it was over."""
        return self.begin_s + self.length_s


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at a moment."""

    track: str
    name: str
    at_s: float
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Gauge:
    """Numbers that were read at a moment."""

    name: str
    at_s: float
    values: Mapping[str, float]


@dataclass(slots=True)
class Timeline:
    """Everything that a log places in time.

    Attributes:
        began_wall_s: wall time of the log's first line, seconds since 1970.
        steps: step records that it shows.
        unreadable: lines that were none.
    """

    began_wall_s: float = 0.0
    steps: int = 0
    unreadable: int = 0
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    gauges: list[Gauge] = field(default_factory=list)


class MicroBatch(msgspec.Struct, gc=False):
    """Of a micro-batch, only what a timeline needs; the names are those of `dflash.records.MicroBatchRecord`."""

    batch_id: int
    bucket: int
    epoch: int
    rank: int = 0


class Step(msgspec.Struct, tag_field="kind", tag="step", gc=False):
    """Of a step record, only what a timeline needs."""

    segment: int
    step: int
    wall_time_s: float
    mono_time_s: float
    ce: float | None
    accepted_length: float
    grad_norm: float | None
    lr: float
    skipped: bool
    micro_batches: tuple[MicroBatch, ...]
    step_time_s: float
    wait_time_s: float
    tokens_per_s: float
    ready_depth: int
    feature_depth: int
    target_depths: tuple[int, ...]
    rank_wait_s: tuple[float, ...] = ()


class Event(msgspec.Struct, tag_field="kind", tag="event", gc=False):
    """An event of the log."""

    segment: int
    step: int
    wall_time_s: float
    mono_time_s: float
    event: str
    details: dict[str, Any]


_DECODER: msgspec.json.Decoder[Step | Event] = msgspec.json.Decoder(Step | Event)


def read_timeline(log: Path, *, first_step: int, end_step: int | None) -> Timeline:
    """Read a run's log.

    Args:
        log: `train_log.jsonl`.
        first_step: show the records of steps from here on; segments, saves and events are shown whole.
        end_step: and before this one; None: to the end.

    Raises:
        RunStateError: there is no log, or nothing in it.
    """
    timeline = Timeline()
    try:
        with log.open("rb") as lines:
            items = [item for line in lines if (item := _decoded(line, timeline)) is not None]
    except OSError as error:
        raise RunStateError(
            f"{log} cannot be read: {error.strerror}", remedy="give the folder of a run that was trained"
        ) from error
    if not items:
        raise RunStateError(f"{log} has no line that could be read", remedy="wait for the first step of the training")
    timeline.began_wall_s = items[0].wall_time_s
    builder = _Builder(timeline, starts=_segment_starts(items))
    for item in items:
        if isinstance(item, Event):
            builder.event(item)
        else:
            builder.step(item, shown=first_step <= item.step and (end_step is None or item.step < end_step))
    builder.close()
    timeline.spans.sort(key=lambda span: (span.begin_s, -span.length_s))
    timeline.marks.sort(key=lambda mark: mark.at_s)
    timeline.gauges.sort(key=lambda gauge: gauge.at_s)
    return timeline


def _decoded(line: bytes, timeline: Timeline) -> Step | Event | None:
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, RecursionError):
        timeline.unreadable += bool(line.strip())
        return None


def _segment_starts(items: Iterable[Step | Event]) -> dict[int, int]:
    """First step of each segment: a record is live iff no later segment starts at or before it."""
    starts: dict[int, int] = {}
    for item in items:
        if isinstance(item, Step) or item.event in SEGMENT_STARTS:
            starts[item.segment] = min(item.step, starts.get(item.segment, item.step))
    return starts


@dataclass(slots=True)
class _Open:
    """A span that has begun."""

    name: str
    begin_s: float
    details: dict[str, Any]
    end_s: float


class _Builder:
    """Turns the log's lines, in their order, into spans, marks and gauges."""

    def __init__(self, timeline: Timeline, *, starts: Mapping[int, int]) -> None:
        self._timeline = timeline
        self._starts = starts
        self._offset_s: float | None = None
        self._segment: int | None = None
        self._open_segment: _Open | None = None
        self._epoch: tuple[int, int] | None = None
        self._open_epoch: _Open | None = None
        self._save: tuple[int, _Open] | None = None
        self._rollback: _Open | None = None
        self._finished: tuple[int, ...] = ()
        self._last_s = 0.0

    def event(self, event: Event) -> None:
        """Take in an event."""
        at_s = self._at(event, may_be_another_clock=event.event in (*SEGMENT_STARTS, "rollback_begin"))
        if event.event in ("start", "resume"):
            self._begin_segment(event.segment, event.step, at_s)
        elif event.event not in _BETWEEN:
            self._reach(at_s)
        match event.event:
            case "save_begin" | "save_staged" | "save_durable" | "save_failed":
                self._note_save(event, at_s)
            case "rollback_begin":
                self._rollback = _Open(f"rollback to step {event.details.get('target_step')}", at_s, dict(event.details), at_s)
            case "rollback_end" if self._rollback is not None:
                self._rollback.details |= event.details
                self._add(RUN, self._rollback, end_s=at_s)
                self._rollback = None
            case "start" | "resume" | "config" | "epoch" | "rollback_end":
                pass
            case _:
                self._timeline.marks.append(Mark(RUN, event.event, at_s, event.details | {"step": event.step}))

    def step(self, record: Step, *, shown: bool) -> None:
        """Take in a step record; one that is not shown still tells how long its segment and its epoch lasted."""
        begin_s = self._at(record, may_be_another_clock=record.segment != self._segment)
        end_s = begin_s + record.step_time_s
        if record.segment != self._segment:  # a log that was cut: its beginning is missing
            self._begin_segment(record.segment, record.step, begin_s)
        self._reach(end_s)
        if record.micro_batches:
            self._note_epoch(record.micro_batches[0].epoch, record.segment, begin_s, end_s)
        gained = _gained(self._finished, record.target_depths)
        self._finished = record.target_depths
        if shown:
            self._timeline.steps += 1
            self._show_step(record, begin_s)
            self._show_gauges(record, begin_s, end_s, gained)

    def close(self) -> None:
        """End what is still open where the log ends."""
        self._end_segment()
        if self._rollback is not None:
            self._add(RUN, self._rollback, end_s=self._rollback.begin_s)

    def _at(self, item: Step | Event, *, may_be_another_clock: bool) -> float:
        wall_s, mono_s = item.wall_time_s - self._timeline.began_wall_s, item.mono_time_s
        offset_s = wall_s - mono_s
        if self._offset_s is None or (may_be_another_clock and abs(offset_s - self._offset_s) > ANOTHER_CLOCK_S):
            self._offset_s = offset_s
        return mono_s + self._offset_s

    def _begin_segment(self, segment: int, step: int, at_s: float) -> None:
        ended_s = self._last_s
        self._end_segment()
        if self._segment is not None and at_s > ended_s:
            self._timeline.spans.append(Span(RUN, "no trainer runs", ended_s, at_s - ended_s, {"before_segment": segment}))
        self._segment = segment
        self._finished = ()
        self._open_segment = _Open(f"segment {segment}", at_s, {"segment": segment, "first_step": step}, at_s)
        self._last_s = at_s

    def _end_segment(self) -> None:
        for track, open_span in ((EPOCHS, self._open_epoch), (RUN, self._open_segment)):
            if open_span is not None:
                self._add(track, open_span, end_s=open_span.end_s)
        self._end_save("not known", self._last_s)
        self._open_epoch = self._open_segment = self._epoch = None

    def _reach(self, at_s: float) -> None:
        self._last_s = max(self._last_s, at_s)
        if self._open_segment is not None:
            self._open_segment.end_s = max(self._open_segment.end_s, at_s)

    def _note_epoch(self, epoch: int, segment: int, begin_s: float, end_s: float) -> None:
        if self._epoch != (segment, epoch):
            if self._open_epoch is not None:
                self._add(EPOCHS, self._open_epoch, end_s=self._open_epoch.end_s)
            self._epoch = (segment, epoch)
            self._open_epoch = _Open(f"epoch {epoch}", begin_s, {"epoch": epoch, "segment": segment}, end_s)
        elif self._open_epoch is not None:
            self._open_epoch.end_s = end_s

    def _note_save(self, event: Event, at_s: float) -> None:
        details = dict(event.details)
        if event.event == "save_begin":
            self._end_save("given up", at_s)
            self._save = (event.step, _Open(f"save step-{event.step}", at_s, {"step": event.step}, at_s))
            return
        if event.event == "save_failed":
            self._timeline.marks.append(Mark(CHECKPOINTS, "save_failed", at_s, details | {"step": event.step}))
        if self._save is None or self._save[0] != event.step:
            return
        self._save[1].details |= details
        if event.event == "save_staged":
            blocked_s = float(details.get("blocked_s", 0.0))
            snapshot = Span(DRAFTER, f"snapshot step-{event.step}", at_s - blocked_s, blocked_s, details | {"step": event.step})
            self._timeline.spans.append(snapshot)
        elif event.event == "save_durable":
            self._end_save("durable", at_s)
        elif "retry_in_s" not in details:
            self._end_save("failed", at_s)

    def _end_save(self, outcome: str, at_s: float) -> None:
        if self._save is None:
            return
        step, save = self._save
        save.details["outcome"] = outcome
        begin_s = save.begin_s
        write_s = save.details.get("write_s")
        if isinstance(write_s, int | float) and 0 <= write_s <= at_s - begin_s:
            write = Span(CHECKPOINTS, f"write step-{step}", at_s - write_s, float(write_s), {"step": step})
            self._timeline.spans.append(write)
        self._add(CHECKPOINTS, save, end_s=at_s)
        self._save = None

    def _add(self, track: str, span: _Open, *, end_s: float) -> None:
        self._timeline.spans.append(Span(track, span.name, span.begin_s, max(0.0, end_s - span.begin_s), span.details))

    def _show_step(self, record: Step, begin_s: float) -> None:
        live = not any(segment > record.segment and first <= record.step for segment, first in self._starts.items())
        details = {
            "step": record.step,
            "segment": record.segment,
            "batch_ids": [batch.batch_id for batch in record.micro_batches],
            "buckets": [batch.bucket for batch in record.micro_batches],
            "ce": record.ce,
            "grad_norm": record.grad_norm,
            "lr": record.lr,
            "skipped": record.skipped,
            "wait_time_s": record.wait_time_s,
        }
        spans = self._timeline.spans
        spans.append(Span(DRAFTER, f"step {record.step}", begin_s, record.step_time_s, details, live))
        waited_s = record.rank_wait_s[0] if record.rank_wait_s else record.wait_time_s
        # With one micro-batch the loop waits first and computes then; with several, the log does not say when it waited.
        alone = sum(batch.rank == 0 for batch in record.micro_batches) == 1
        if alone and SHOWN_WAIT_S <= waited_s <= record.step_time_s:
            spans.append(Span(DRAFTER, "waits for features", begin_s, waited_s, {"step": record.step}, live))

    def _show_gauges(self, record: Step, begin_s: float, end_s: float, gained: tuple[int, ...]) -> None:
        queues = {"ready": record.ready_depth, "features": record.feature_depth}
        self._timeline.gauges += [
            Gauge("queues (batches)", begin_s, queues),
            Gauge("tokens/s", end_s, {"tokens/s": record.tokens_per_s}),
            Gauge("accepted length", end_s, {"accepted length": record.accepted_length}),
        ]
        if gained:
            targets = {f"target {index}": count for index, count in enumerate(gained)}
            self._timeline.gauges.append(Gauge("batches finished in the step", end_s, targets))
        if record.ce is not None:
            self._timeline.gauges.append(Gauge("loss", end_s, {"ce": record.ce}))
        if len(record.rank_wait_s) > 1:
            waits = {f"rank {rank}": wait_s for rank, wait_s in enumerate(record.rank_wait_s)}
            self._timeline.gauges.append(Gauge("wait for features (s)", end_s, waits))


def _gained(before: tuple[int, ...], now: tuple[int, ...]) -> tuple[int, ...]:
    """Batches that each target worker finished between two records; the counts begin at zero with every trainer."""
    known = before if len(before) == len(now) else (0,) * len(now)
    return tuple(max(0, count - earlier) for count, earlier in zip(now, known, strict=True))
