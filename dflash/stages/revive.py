"""A dead run: its flow's process is gone without a word. What it left is reaped, its flow run gets a true state, a new one starts.

Invariant: however often this is interrupted and repeated, and however many do it at once, one death leads to one new flow run: the
idempotency key is made of the dead flow run's id and the attempt's number, and the note that ends the attempt is written last.
Hard decision: who asks for the run to go on is the server's record of the dead flow run. One that was cancelled, or that somebody
gave an end, or that the server does not know, is closed and not started again; neither is a halted run, or one that dies too often.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from dflash.checkpoint import read_ledger
from dflash.config import Config
from dflash.errors import HaltedError, RunStateError
from dflash.records import RollbackEntry, RunPaths
from dflash.stages.run import newest_run, reopen_run
from dflash.train.attempts import (
    DIED,
    FINISHED,
    Attempt,
    announce_attempt,
    attempts,
    deaths,
    end_attempt,
    note_told,
    open_attempts,
    untold_ends,
)
from dflash.train.follow import LogFollower
from dflash.train.processes import STOP_GRACE_S, end_recorded
from dflash.train.requests import halted_by
from dflash.train.restarts import RestartBudget
from dflash.train.runs import hold_run

logger = logging.getLogger(__name__)

HALTED = HaltedError.__name__
"""How a flow run ended whose run was halted."""

SILENT_BEATS = 5.0
"""Heartbeats that are missing before a supervisor counts as silent."""

Known = Literal["waiting", "alive", "crashed", "cancelled", "ended", "unknown"]
"""What a server says of a flow run: not begun, running, crashed, cancelled (or about to be), given an end, never heard of."""

Given = Literal["Completed", "Crashed", "Cancelled", "Failed"]
"""States that a dead flow run is given."""


class FlowRuns(Protocol):
    """What reviving needs of the server; every method may be repeated."""

    def known(self, flow_run: str) -> Known:
        """What the server says of a flow run."""

    def give(self, flow_run: str, state: Given, message: str) -> None:
        """Force a state, whatever the flow run's is."""

    def start(self, attempt: Attempt, *, key: str) -> str:
        """Start the attempt's deployment with its parameters, once a key; returns the new flow run's id."""


@dataclass(frozen=True, slots=True)
class Revival:
    """What was done about a dead run.

    Attributes:
        run: its folder's name.
        flow_run: the dead one.
        continued_by: the new one; None if none was started.
        reason: in words.
        loud: whether a person has to know, because nobody goes on.
    """

    run: str
    flow_run: str
    continued_by: str | None
    reason: str
    loud: bool


def revive_stage(run_dir: str | Path, *, server: FlowRuns) -> list[Revival]:
    """Bring a run whose flow has died back, or close it; empty if there is nothing to do.

    Args:
        run_dir: the run's folder.
        server: where its flow runs are known.
    """
    run = reopen_run(run_dir)
    paths = run.paths
    with _alone(paths) as alone:
        dead = dead_attempts(run.config, paths) if alone else []
        newest = attempts(paths)[-1] if dead else None
        if alone:
            _tell_ends(paths, server)
        done = [_revive(run.config, paths, attempt, server, overtaken=attempt != newest) for attempt in dead]
    return [revival for revival in done if revival is not None]


def dead_attempts(config: Config, paths: RunPaths) -> list[Attempt]:
    """Flow runs of a run that have died without a word, or may have: only the server knows of one that has not begun."""
    return open_attempts(paths, patience_s=SILENT_BEATS * config.train.heartbeat_s)


def _revive(config: Config, paths: RunPaths, attempt: Attempt, server: FlowRuns, *, overtaken: bool) -> Revival | None:
    """Give the dead flow run its state, start the next one where one is wanted, and note the end last."""
    known = server.known(attempt.flow_run)
    if attempt.process is None and known in ("waiting", "alive"):
        return None
    if not overtaken and not _reaped(paths):
        return None
    records = _records(paths)
    fate = _fate_at_server(known) or (OVERTAKEN if overtaken else _fate(config, paths, attempt, records))
    message = f"run {paths.root.name}: {fate.reason}"
    if fate.state is not None:
        server.give(attempt.flow_run, fate.state, message)
    continued_by = None
    if fate.again:
        continued_by = server.start(attempt, key=f"dflash-again-{attempt.flow_run}-{attempt.number}")
        announce_attempt(paths, attempt, flow_run=continued_by)
    how = DIED if known in ("waiting", "alive", "crashed") else known
    end_attempt(paths, attempt.flow_run, how=how, records=records, continued_by=continued_by)
    logger.warning("%s%s", message, f"; flow run {continued_by} goes on" if continued_by else "")
    return Revival(paths.root.name, attempt.flow_run, continued_by, fate.reason, loud=fate.loud)


def _tell_ends(paths: RunPaths, server: FlowRuns) -> None:
    """Flow runs that ended in order, but were killed before the server had heard of it, get the state that is theirs."""
    for attempt, end in untold_ends(paths):
        state = _state_owed(server.known(attempt.flow_run), end.how)
        if state is not None:
            halt = _halt_reason(paths) if end.how == HALTED else None  # its request may have been removed since
            how = f"ended with {end.how!r}" if halt is None else f"halted: {halt}"
            server.give(attempt.flow_run, state, f"run {paths.root.name}: {how}; told by a health check")
        note_told(paths, attempt.flow_run)


def _state_owed(known: Known, how: str) -> Given | None:
    """What the server has not heard: one that is only on its way to `Cancelled` holds its deployment's slot for ever."""
    if known == "cancelled":
        return "Cancelled"
    if known in ("waiting", "alive") or (known == "crashed" and how in (FINISHED, HALTED)):
        return "Completed" if how == FINISHED else "Failed"
    return None


def _reaped(paths: RunPaths) -> bool:
    """End what the dead flow left; False if somebody has taken the run over and keeps its processes."""
    try:
        with hold_run(paths):
            end_recorded(paths, grace_s=STOP_GRACE_S)
    except RunStateError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Fate:
    """What becomes of a dead flow run: its state, why, whether the run goes on, whether a person has to know."""

    state: Given | None
    reason: str
    again: bool = False
    loud: bool = False


OVERTAKEN = _Fate("Crashed", "its process died, and another flow run has taken its place")


def _fate_at_server(known: Known) -> _Fate | None:
    """What the server's record alone decides: nobody wants the run to go on."""
    if known == "cancelled":
        return _Fate("Cancelled", "it was cancelled, and its process ended before it could say so")
    if known in ("ended", "unknown"):
        return _Fate(None, f"its process is gone, and the server says that its flow run is {known}: nobody wants it to go on")
    return None


def _fate(config: Config, paths: RunPaths, attempt: Attempt, records: int) -> _Fate:
    """What the run's own facts say."""
    halt = _halt_reason(paths)
    if halt is not None:
        return _Fate("Failed", f"halted: {halt}; its process ended before it could say so", loud=True)
    if paths.summary.exists():
        return _Fate("Crashed", "its process died after the run had finished")
    budget = RestartBudget(config.train)
    for end in (*deaths(paths), records):
        budget.crashed(end=end)
    if budget.spent:
        return _Fate("Failed", f"given up: it died {budget.in_row} times in a row without enough new steps", loud=True)
    if attempt.deployment is None:
        return _Fate("Crashed", "its process died; no deployment started it: start it again the same way", loud=True)
    if newest_run(config) != paths.root.name:
        return _Fate("Crashed", "its process died, and a newer run of its configuration exists")
    return _Fate("Crashed", f"its process died at step {records}", again=True)


def _halt_reason(paths: RunPaths) -> str | None:
    halts = [line for line in read_ledger(paths.ledger) if isinstance(line, RollbackEntry) and line.phase == "halt"]
    request = halted_by(paths) if paths.requests_dir.is_dir() else None
    return halts[-1].plan.reason if halts else None if request is None else request.reason


def _records(paths: RunPaths) -> int:
    follower = LogFollower(paths.log)
    follower.poll()
    return follower.end


@contextlib.contextmanager
def _alone(paths: RunPaths) -> Iterator[bool]:
    """Whether nobody else looks after this run's death now."""
    paths.control_dir.mkdir(parents=True, exist_ok=True)
    with (paths.control_dir / "revive.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
