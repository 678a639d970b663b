"""Attempts: which flow runs worked on a run, and how each of them ended; the facts that tell a dead run from one that ended.

Invariant: a flow run that ends in order says so itself, whatever the reason; so one without an end whose process is gone has died.
Each fact is a file of its own, written once: a late note about an earlier flow run can never hide the newest one.
Hard decision: processes are judged by identity (pid, start time, boot) and the run's lock, heartbeats only on top of that and by
the monotonic clock where the boot is the same: a wall clock that is set, or a suspended machine, makes nobody dead.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from dflash.errors import DataError
from dflash.records import RunPaths, from_json, to_json
from dflash.storage import atomic_write_text, create_exclusively
from dflash.train.heartbeat import heartbeat_age_s
from dflash.train.processes import ProcessIdentity, identify, this_process
from dflash.train.runs import run_is_live

ATTEMPT_SCHEMA_VERSION = 1

_END_SUFFIX = ".end.json"
_TOLD_SUFFIX = ".told"

DIED = "died"
"""How a flow run ended that could not say it."""

FINISHED = "finished"

_NoteT = TypeVar("_NoteT")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One flow run that works, or worked, on a run.

    Attributes:
        flow_run, deployment: ids; deployment is None for a flow that was run as a program.
        parameters: of the flow run, so that it can be started again.
        number: counts the attempts of a run, from 0.
        host: name of the machine.
        process: of the flow; None until the flow run has begun.
    """

    flow_run: str
    deployment: str | None
    parameters: Mapping[str, Any]
    number: int
    host: str
    process: ProcessIdentity | None
    begun_at: str
    schema_version: int = ATTEMPT_SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How an attempt ended.

    Attributes:
        how: `finished`, the class name of the error, or `died`.
        records: live records in the log by then.
        continued_by: flow run that was started in its place.
    """

    how: str
    records: int
    continued_by: str | None
    ended_at: str
    schema_version: int = ATTEMPT_SCHEMA_VERSION


def begin_attempt(paths: RunPaths, *, flow_run: str, deployment: str | None, parameters: Mapping[str, Any]) -> Attempt:
    """Note that the calling process works on the run as the flow run `flow_run`.

    A flow run that has ended may begin once more (Prefect's "retry"): how it ended says nothing of this time, and it is the newest.
    """
    known, process = read_attempt(paths, flow_run), this_process(role="flow")
    end, told = (paths.attempts_dir / f"{flow_run}{suffix}" for suffix in (_END_SUFFIX, _TOLD_SUFFIX))
    attempt = _new(paths, flow_run, deployment, parameters, process)
    if known is not None and known.process in (None, process) and not end.exists():
        attempt = replace(known, process=process, host=attempt.host)
    told.unlink(missing_ok=True)
    end.unlink(missing_ok=True)
    paths.attempts_dir.mkdir(parents=True, exist_ok=True)
    atomic_write_text(paths.attempts_dir / f"{flow_run}.json", to_json(attempt, indent=2))
    return attempt


def announce_attempt(paths: RunPaths, successor_of: Attempt, *, flow_run: str) -> Attempt:
    """Note that `flow_run` was started in the place of a dead one and has not begun yet; one that has begun is left as it is."""
    attempt = _new(paths, flow_run, successor_of.deployment, successor_of.parameters, None)
    create_exclusively(paths.attempts_dir / f"{flow_run}.json", to_json(attempt, indent=2).encode())
    return read_attempt(paths, flow_run) or attempt


def end_attempt(paths: RunPaths, flow_run: str, *, how: str, records: int, continued_by: str | None) -> None:
    """Note how a flow run ended; the first note stands."""
    end = AttemptEnd(how=how, records=records, continued_by=continued_by, ended_at=_now())
    paths.attempts_dir.mkdir(parents=True, exist_ok=True)
    create_exclusively(paths.attempts_dir / f"{flow_run}{_END_SUFFIX}", to_json(end, indent=2).encode())


def attempts(paths: RunPaths) -> list[Attempt]:
    """All attempts of a run, in the order they began; unreadable notes are none."""
    files = paths.attempts_dir.glob("*.json") if paths.attempts_dir.is_dir() else ()
    names = (file.name.removesuffix(".json") for file in files if not file.name.endswith(_END_SUFFIX) and file.name[0] != ".")
    found = (read_attempt(paths, name) for name in names)
    return sorted((attempt for attempt in found if attempt is not None), key=lambda attempt: (attempt.number, attempt.begun_at))


def was_started_from(paths: RunPaths, *, config: str, overrides: Sequence[str]) -> bool:
    """Whether the newest flow run of a run was given this configuration file, with at least these overrides."""
    known = attempts(paths)
    given = known[-1].parameters if known else {}
    same = isinstance(given.get("config"), str) and Path(given["config"]).resolve() == Path(config).resolve()
    return same and set(overrides) <= set(given.get("overrides") or ())


def read_attempt(paths: RunPaths, flow_run: str) -> Attempt | None:
    """The note of one flow run; None if there is none, or one of another: file names are made from it."""
    found = _read(Attempt, paths.attempts_dir / f"{flow_run}.json")
    return found if found is not None and found.flow_run == flow_run else None


def end_of(paths: RunPaths, flow_run: str) -> AttemptEnd | None:
    """How a flow run ended; None if it did not say."""
    return _read(AttemptEnd, paths.attempts_dir / f"{flow_run}{_END_SUFFIX}")


def deaths(paths: RunPaths) -> list[int]:
    """Records in the log at each death, oldest first."""
    ends = (end_of(paths, attempt.flow_run) for attempt in attempts(paths))
    return [end.records for end in ends if end is not None and end.how == DIED]


def open_attempts(paths: RunPaths, *, patience_s: float) -> list[Attempt]:
    """Attempts without an end that nothing alive can be, oldest first; all but the newest were overtaken by another.

    One that has not begun (`process` is None) is among them: only the server knows whether it still may.

    Args:
        paths: the run's folder.
        patience_s: age of the supervisor's heartbeat from which on it counts as silent.
    """
    known = attempts(paths)
    found = [attempt for attempt in known if end_of(paths, attempt.flow_run) is None and not is_running(attempt.process)]
    if not found or found[-1] != known[-1] or found[-1].process is None:
        return found
    # A process of another machine cannot be looked up, and one of this machine may be in another container: silence counts too.
    quiet = not run_is_live(paths) and heartbeat_age_s(paths) > patience_s
    return found if quiet else found[:-1]


def untold_ends(paths: RunPaths) -> list[tuple[Attempt, AttemptEnd]]:
    """Attempts that have said how they ended, whose process is gone, and of which nobody has seen that the server knows it."""
    ended = [(attempt, end_of(paths, attempt.flow_run)) for attempt in attempts(paths) if not is_running(attempt.process)]
    return [(attempt, end) for attempt, end in ended if end is not None and not _is_settled(paths, end, attempt.flow_run)]


def any_unsettled(paths: RunPaths) -> bool:
    """Whether a run has an attempt without an end, or with one that the server may not know: most runs of a folder have none."""
    ends = ((attempt.flow_run, end_of(paths, attempt.flow_run)) for attempt in attempts(paths))
    return any(end is None or not _is_settled(paths, end, flow_run) for flow_run, end in ends)


def _is_settled(paths: RunPaths, end: AttemptEnd, flow_run: str) -> bool:
    """Whether the server knows an end: whoever notes a death has told it before."""
    return end.how == DIED or (paths.attempts_dir / f"{flow_run}{_TOLD_SUFFIX}").exists()


def note_told(paths: RunPaths, flow_run: str) -> None:
    """Note that the server knows how a flow run ended."""
    (paths.attempts_dir / f"{flow_run}{_TOLD_SUFFIX}").touch()


def is_running(process: ProcessIdentity | None) -> bool:
    """Whether exactly this process runs on this machine now."""
    return process is not None and identify(process.pid, role=process.role) == process


def _new(
    paths: RunPaths, flow_run: str, deployment: str | None, parameters: Mapping[str, Any], process: ProcessIdentity | None
) -> Attempt:
    """An attempt with the next number."""
    number = max((attempt.number for attempt in attempts(paths)), default=-1) + 1
    return Attempt(flow_run, deployment, dict(parameters), number, socket.gethostname(), process, _now())


def _read(kind: type[_NoteT], file: Path) -> _NoteT | None:
    """The note in a file; None if there is none, or none that can be read."""
    try:
        return from_json(kind, file.read_bytes(), origin=str(file))
    except (FileNotFoundError, DataError):
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
