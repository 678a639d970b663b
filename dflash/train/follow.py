r"""The supervisor's own view of the run log: progress, waiting and coverage of live records, read incrementally.

Invariant: only live records count: a segment that starts at step s abandons everything earlier segments logged from s
on. Only whole lines are consumed; a torn one in the middle is skipped (the health check reports it).
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash.records import SEGMENT_STARTS

_BETWEEN_SEGMENTS = ("rollback_begin", "rollback_end")
"""Written by a supervisor while no trainer runs: they announce a segment, the trainer then begins it."""


class NewLines:
    """A file of JSON lines that others append to: what is new in it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """Objects of the whole lines since the last call; none while there is no file."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return iter(())
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        return parse_lines(data[:whole])


class LogFollower:
    """Reads what is new at each `poll`; memory is 16 bytes a step."""

    def __init__(self, path: Path) -> None:
        self._lines = NewLines(path)
        self._step_time_s = array("d")
        self._wait_time_s = array("d")
        self.last_segment: int | None = None
        """Number of the newest segment whose trainer logged anything."""

    def poll(self) -> None:
        """Read the lines written since the last call."""
        for item in self._lines.read():
            kind, step, segment = item.get("kind"), item.get("step"), item.get("segment")
            if not isinstance(step, int) or not isinstance(segment, int):
                continue
            if item.get("event") not in _BETWEEN_SEGMENTS:
                self.last_segment = segment if self.last_segment is None else max(self.last_segment, segment)
            if kind == "event" and item.get("event") in SEGMENT_STARTS:
                self._abandon(step)
            elif kind == "step":
                self._note(step, float(item["step_time_s"]), float(item["wait_time_s"]))

    @property
    def end(self) -> int:
        """One more than the last live record's step; 0 without records."""
        return len(self._step_time_s)

    def coverage_frac(self, first: int, end: int) -> float:
        """Share of records [first, end) that are live in the log; 1 for an empty range."""
        if end <= first:
            return 1.0
        return sum(not math.isnan(value) for value in self._step_time_s[first:end]) / (end - first)

    def train_time_s(self) -> float:
        """Summed time of all live steps."""
        return sum(value for value in self._step_time_s if not math.isnan(value))

    def wait_frac(self) -> float:
        """Share of that time that the drafter waited for features; 0 without records."""
        total_s = self.train_time_s()
        return sum(value for value in self._wait_time_s if not math.isnan(value)) / total_s if total_s else 0.0

    def _abandon(self, step: int) -> None:
        """Forget records from `step` on, and the gap that may now be at the end."""
        del self._step_time_s[step:]
        while self._step_time_s and math.isnan(self._step_time_s[-1]):
            self._step_time_s.pop()
        del self._wait_time_s[len(self._step_time_s) :]

    def _note(self, step: int, step_time_s: float, wait_time_s: float) -> None:
        missing = step + 1 - len(self._step_time_s)
        if missing > 0:
            self._step_time_s.extend([math.nan] * missing)
            self._wait_time_s.extend([math.nan] * missing)
        self._step_time_s[step], self._wait_time_s[step] = step_time_s, wait_time_s


def parse_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """JSON objects of whole lines; lines that are none are skipped."""
    for line in data.split(b"\n"):
        try:
            item = json.loads(line)
        except ValueError:
            continue
        if isinstance(item, dict):
            yield item
