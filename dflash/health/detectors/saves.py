"""Saves that failed: training goes on, but a crash would then lose more than one interval."""

from __future__ import annotations

import msgspec

from dflash.health.detectors.base import Detector, Memory
from dflash.health.lines import EventLine


class SaveMemory(Memory):
    """Failed saves that no later one has made good."""

    open_failures: list[int] = msgspec.field(default_factory=list)


class SaveFailure(Detector):
    """A checkpoint that could not be written, or was skipped because the one before was still being written."""

    name = "save failure"
    domain = "operations"
    _memory: SaveMemory

    def __init__(self) -> None:
        super().__init__(SaveMemory())

    def rule(self) -> str:
        """The rule with its thresholds."""
        return "every save that begins becomes durable; a failed or skipped one is a warning until a later one is durable"

    def on_event(self, event: EventLine) -> None:
        """Judge an event."""
        memory = self._memory
        if event.event == "save_durable":
            self.checked += 1
            for number in memory.open_failures:
                self.findings.amend(number, resolved_step=event.step)
            memory.open_failures = []
        elif event.event in ("save_failed", "save_skipped"):
            self.checked += 1
            verb = "failed" if event.event == "save_failed" else "was skipped"
            reason = event.details.get("reason") or event.details.get("error")
            message = f"the save of step {event.step} {verb}" + (f": {reason}" if reason else "")
            memory.open_failures.append(self._finding("warn", message, steps=(event.step, event.step, event.step)))
