"""A timeline as Chrome trace events (JSON), which Perfetto and chrome://tracing open; times in microseconds.

Invariant: one process, one thread a track, complete events (`X`) in the order of their begin, an outer one before what lies in it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from dflash.errors import RunStateError
from dflash.train.timeline import RUN, TRACKS, Timeline

MAX_STEPS: Final = 100_000
"""More steps than a viewer opens: eight events a step."""

_PID: Final = 1


def chrome_trace(timeline: Timeline, *, run: str) -> dict[str, Any]:
    """The trace as a JSON-able object.

    Args:
        timeline: of a log.
        run: name of the run, shown as the process.

    Raises:
        RunStateError: the timeline holds more steps than a viewer opens.
    """
    if timeline.steps > MAX_STEPS:
        raise RunStateError(
            f"a trace of {timeline.steps} steps is larger than what viewers open ({MAX_STEPS})",
            remedy="choose some, e.g. --steps 10000:20000",
        )
    timed = [*_spans(timeline), *_marks(timeline), *_gauges(timeline)]
    timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return {
        "traceEvents": [*_names(run), *timed],
        "displayTimeUnit": "ms",
        "otherData": {
            "run": run,
            "began": datetime.fromtimestamp(timeline.began_wall_s, UTC).isoformat(),
            "steps": timeline.steps,
            "unreadable_lines": timeline.unreadable,
        },
    }


def _names(run: str) -> list[dict[str, Any]]:
    named: list[dict[str, Any]] = [_meta("process_name", 0, {"name": f"run {run}"})]
    for tid, track in enumerate(TRACKS, start=1):
        named += [_meta("thread_name", tid, {"name": track}), _meta("thread_sort_index", tid, {"sort_index": tid})]
    return named


def _meta(name: str, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": _PID, "tid": tid, "args": args}


def _spans(timeline: Timeline) -> list[dict[str, Any]]:
    return [
        {
            "ph": "X",
            "name": span.name,
            "cat": "live" if span.live else "abandoned",
            "pid": _PID,
            "tid": TRACKS.index(span.track) + 1,
            "ts": _us(span.begin_s),
            "dur": _us(span.length_s),
            "args": dict(span.details) | ({} if span.live else {"abandoned": True}),
        }
        for span in timeline.spans
    ]


def _marks(timeline: Timeline) -> list[dict[str, Any]]:
    return [
        {
            "ph": "i",
            "name": mark.name,
            "cat": "event",
            "pid": _PID,
            "tid": TRACKS.index(mark.track) + 1,
            "ts": _us(mark.at_s),
            "s": "p" if mark.track == RUN else "t",
            "args": dict(mark.details),
        }
        for mark in timeline.marks
    ]


def _gauges(timeline: Timeline) -> list[dict[str, Any]]:
    return [
        {"ph": "C", "name": gauge.name, "pid": _PID, "ts": _us(gauge.at_s), "args": dict(gauge.values)} for gauge in timeline.gauges
    ]


def _us(seconds: float) -> float:
    """Microseconds, to the nanosecond: what the log's clock resolves."""
    return round(seconds * 1e6, 3)
