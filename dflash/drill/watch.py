"""Watches one run's folder from outside: every new line of its log, ledger and control folder as a moment of the drill.

Invariant: it only reads plain files, incrementally; nothing in the run knows that it is being watched. Moments carry the times
that the files give, so the order of things is the run's own and not that of the watching.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from dflash.checkpoint import read_ledger
from dflash.drill.timeline import Moment
from dflash.records import ControlRequest, LedgerEntry, RollbackEntry, RunPaths, from_json
from dflash.train.follow import NewLines
from dflash.train.planted_log import planted_lines
from dflash.train.requests import ACK_SUFFIX

_NEWEST = 25
"""Records whose mean loss is shown."""


class RunWatch:
    """One run, seen from outside.

    Attributes:
        step: newest step logged in the newest segment, -1 before the first.
        durable: newest checkpoint that became durable, None before the first.
    """

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.step = -1
        self.durable: int | None = None
        self._log_lines = NewLines(paths.log)
        self._ledger_lines = self._planted = 0
        self._requests: set[str] = set()
        self._acknowledged: set[str] = set()
        self._losses: deque[float] = deque(maxlen=_NEWEST)

    @property
    def loss(self) -> float | None:
        """Mean of the newest losses; None without any."""
        return sum(self._losses) / len(self._losses) if self._losses else None

    def poll(self) -> list[Moment]:
        """What happened since the last call, oldest first."""
        moments = [*self._from_log(), *self._from_planted(), *self._from_requests(), *self._from_ledger()]
        return sorted(moments, key=lambda moment: moment.at_s)

    def _from_log(self) -> Iterator[Moment]:
        for line in self._log_lines.read():
            step, at_s = int(line["step"]), float(line["wall_time_s"])
            if line["kind"] == "step":
                self.step = step
                if line["ce"] is not None:
                    self._losses.append(float(line["ce"]))
                continue
            if line["event"] == "save_durable":
                self.durable = step
            text = _log_text(line)
            if text is not None:
                yield Moment(at_s, step, text)

    def _from_planted(self) -> Iterator[Moment]:
        lines = planted_lines(self.paths)
        for line in lines[self._planted :]:
            what = "" if line.position is None else f": batch {line.position} of the plan"
            yield Moment(line.at_s, line.step, f"FAULT {line.name} takes effect{what}")
        self._planted = len(lines)

    def _from_requests(self) -> Iterator[Moment]:
        for file in sorted(self.paths.requests_dir.glob("*.json")) if self.paths.requests_dir.is_dir() else []:
            if file.name.endswith(ACK_SUFFIX):
                if file.name not in self._acknowledged:
                    self._acknowledged.add(file.name)
                    yield Moment(file.stat().st_mtime, None, "supervisor: request acknowledged")
            elif file.name not in self._requests:
                self._requests.add(file.name)
                request = from_json(ControlRequest, file.read_bytes(), origin=str(file))
                step = None if request.plan is None else request.plan.alarm_step
                yield Moment(file.stat().st_mtime, step, _request_text(request))

    def _from_ledger(self) -> Iterator[Moment]:
        lines = read_ledger(self.paths.ledger)
        fallen: list[LedgerEntry] = []
        for line in lines[self._ledger_lines :]:
            if isinstance(line, RollbackEntry):
                yield Moment(line.at_s, line.target_step, _rollback_text(line))
            elif line.state in ("suspect", "bad"):
                fallen.append(line)
        for state in ("suspect", "bad"):
            yield from _fallen([line for line in fallen if line.state == state])
        self._ledger_lines = len(lines)


def _fallen(lines: Sequence[LedgerEntry]) -> Iterator[Moment]:
    """Checkpoints that lost their standing together, as one moment."""
    if lines:
        steps = ", ".join(f"step-{line.step}" for line in sorted(lines, key=lambda line: line.step))
        at_s = datetime.fromisoformat(lines[-1].at).timestamp()
        yield Moment(at_s, lines[0].step, f"ledger: {steps} {lines[0].state}: {lines[0].reason}")


def _log_text(line: Mapping[str, Any]) -> str | None:
    """An event of the log in words; None for what happens all the time."""
    details, segment = line["details"], line["segment"]
    match line["event"]:
        case "start":
            return "training begins"
        case "resume":
            return f"trainer: segment {segment} goes on from checkpoint step-{line['step']}"
        case "skip":
            what = "not finite" if details.get("nonfinite") else "over the limit of the gradient guard"
            return f"trainer: update of batch {', '.join(map(str, details['batch_ids']))} skipped, {what}"
        case "save_failed":
            return f"trainer: save of step-{line['step']} failed: {details.get('error')}"
        case "save_skipped":
            return f"trainer: save of step-{line['step']} skipped, another is in flight"
        case "stop_requested":
            return "trainer: stops after this step"
        case "finish":
            return "training is finished"
    return None


def _request_text(request: ControlRequest) -> str:
    text = f"{request.requested_by} requests {request.action}"
    plan = request.plan
    if plan is not None and plan.action == "rollback":
        skipped = sum(end - first for first, end in plan.skip)
        text += f" to step-{plan.target_step} (rung {plan.rung}), {skipped} batches to be skipped"
    return f"{text}: {request.reason}"


def _rollback_text(entry: RollbackEntry) -> str:
    if entry.phase == "begin":
        return f"supervisor: rolling back to step-{entry.target_step} (rung {entry.plan.rung})"
    if entry.phase == "halt":
        return f"supervisor: the run is halted: {entry.plan.reason}"
    ranges = ", ".join(f"{first}..{end - 1}" for first, end in entry.plan.skip) or "nothing"
    return f"supervisor: back at step-{entry.target_step}; segment {entry.next_segment} leaves out batches {ranges}"
