r"""Forwarding of the training log to the tracker: the log is the spool, the store follows.

Invariant: a record is sent once per MLflow run. The offset moves only behind complete lines that the store has
taken; a step at or below the last one sent (a trainer that resumed and did the same updates again, bit for bit)
is passed over.
Lines that are not records are passed over too: judging the log is the health check's business, not this one's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash.records import RunPaths
from dflash.tracking.state import load_state, save_state
from dflash.tracking.tracker import Tracker

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
"""Bytes of log sent between two writes of the offset: about 800 records, 0.3 s on SQLite."""


class LogForwarder:
    """Sends what is new in a run's training log to its tracker.

    Args:
        paths: the run's folder.
        tracker: where the records go.
    """

    def __init__(self, paths: RunPaths, tracker: Tracker) -> None:
        self._paths = paths
        self._tracker = tracker

    def forward(self) -> int:
        """Send all complete new lines; returns the number of step records sent, 0 while the store is away."""
        sent = 0
        # The store comes first: finding its run again (or a new one) may move the offset.
        while self._paths.log.is_file() and self._tracker.connect():
            state = load_state(self._paths.tracking_state)
            if state is None:  # tracking is switched off
                break
            data, offset = _complete_lines(self._paths.log, state.log_offset_bytes)
            records = _new_steps(data, state.last_step)
            if not data:
                break
            save_state(self._paths.tracking_state, replace(state, sending=True))
            if not self._tracker.log_steps(records):
                break
            last_step = records[-1]["step"] if records else state.last_step
            done = replace(state, log_offset_bytes=offset + len(data), last_step=last_step, sending=False)
            save_state(self._paths.tracking_state, done)
            sent += len(records)
        return sent


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
