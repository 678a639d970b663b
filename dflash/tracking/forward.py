r"""Forwarding of the training log to the tracker: the log is the spool, the store follows.

Invariant: a record is sent once per MLflow run. The offset moves only behind complete lines that the store has
taken; a step at or below the last one sent (a trainer that resumed and did the same updates again, bit for bit)
is passed over.
A rollback ends the MLflow run of its segment: the steps behind it belong to a new one.
Lines that are not records are passed over too: judging the log is the health check's business, not this one's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash.records import RunPaths
from dflash.tracking.names import probe_metrics
from dflash.tracking.state import TrackingState, load_state, save_state
from dflash.tracking.tracker import Tracker

logger = logging.getLogger(__name__)

_ROLLBACK_MARK = b"rollback_end"
_PROBE_MARK = b"acceptance_probe"

CHUNK_BYTES = 1 << 20
"""Bytes of log sent between two writes of the offset: about 800 records, 0.3 s on SQLite."""


BeginSegment = Callable[[Mapping[str, Any]], Tracker | None]
"""Ends the abandoned segment's MLflow run and opens one for the segment that a `rollback_end` event announces; None if the store
was away, and it has to be done again."""


class LogForwarder:
    """Sends what is new in a run's training log to its tracker.

    Args:
        paths: the run's folder.
        tracker: where the records go.
        begin_segment: called with each `rollback_end` event of the log; again after a crash, or after the store was away.
    """

    def __init__(self, paths: RunPaths, tracker: Tracker, *, begin_segment: BeginSegment) -> None:
        self._paths = paths
        self._tracker = tracker
        self._begin_segment = begin_segment

    @property
    def tracker(self) -> Tracker:
        """The tracker of the segment that the forwarded records have reached."""
        return self._tracker

    def forward(self) -> int:
        """Send all complete new lines; returns the number of step records sent, 0 while the store is away."""
        sent = 0
        # The store comes first: finding its run again (or a new one) may move the offset.
        while self._paths.log.is_file() and self._tracker.connect():
            state = load_state(self._paths.tracking_state)
            if state is None:  # tracking is switched off
                break
            data, offset = _complete_lines(self._paths.log, state.log_offset_bytes)
            data, rollback = _up_to_rollback(data)
            if rollback is not None and not data:
                if not self._enter_segment(rollback, state, offset=offset):
                    break
                continue
            records = _new_steps(data, state.last_step)
            if not data:
                break
            save_state(self._paths.tracking_state, replace(state, sending=True))
            if not self._tracker.log_steps(records):
                break
            self._send_probes(data)
            last_step = records[-1]["step"] if records else state.last_step
            done = replace(state, log_offset_bytes=offset + len(data), last_step=last_step, sending=False)
            save_state(self._paths.tracking_state, done)
            sent += len(records)
        return sent

    def _send_probes(self, data: bytes) -> None:
        """Send the acceptance probes; one that is sent twice has one value at one step all the same."""
        for line in data.splitlines():
            if _PROBE_MARK in line and (event := _event(line)) and event.get("event") == "acceptance_probe":
                self._tracker.log_metrics(probe_metrics(event["details"]), step=event["step"])

    def _enter_segment(self, line: bytes, state: TrackingState, *, offset: int) -> bool:
        """Go on behind a `rollback_end` line, in the MLflow run of the segment that it announces; False while the store is away.

        The line is passed last: a crash before that finds the line again, and either nothing done or the new run current.
        """
        event = json.loads(line)
        if event["segment"] > state.segment:
            tracker = self._begin_segment(event)
            if tracker is None:
                return False
            self._tracker = tracker  # at once: what waits in it is sent by the next look, and nothing more goes to the old one
            if not tracker.connect():
                return False
        current = load_state(self._paths.tracking_state) or state
        save_state(self._paths.tracking_state, replace(current, log_offset_bytes=offset + len(line), sending=False))
        return True


def _complete_lines(log: Path, offset: int) -> tuple[bytes, int]:
    """Bytes of whole lines from `offset` (at least one line, about CHUNK_BYTES), and where they really start."""
    with log.open("rb") as file:
        if file.seek(0, 2) < offset:
            logger.warning("%s is shorter than what was forwarded of it: starting again from its beginning", log)
            offset = 0
        file.seek(offset)
        data = file.read(CHUNK_BYTES)
        if len(data) == CHUNK_BYTES:
            data += file.readline()
    return data[: data.rfind(b"\n") + 1], offset


def _up_to_rollback(data: bytes) -> tuple[bytes, bytes | None]:
    """Lines before the first `rollback_end` event, and the line of that event if there is one."""
    start = 0
    for line in data.splitlines(keepends=True):
        if _ROLLBACK_MARK in line and _is_rollback(line):
            return data[:start], line
        start += len(line)
    return data, None


def _is_rollback(line: bytes) -> bool:
    event = _event(line)
    return event.get("event") == "rollback_end" and isinstance(event.get("segment"), int)


def _event(line: bytes) -> Mapping[str, Any]:
    """The JSON object of a line, an empty one if it is none."""
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def _new_steps(data: bytes, last_step: int) -> list[Mapping[str, Any]]:
    records: list[Mapping[str, Any]] = []
    for line in data.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            logger.debug("passing over a line of the training log that is not JSON")
            continue
        if isinstance(record, dict) and record.get("kind") == "step" and record["step"] > last_step:
            records.append(record)
            last_step = record["step"]
    return records
