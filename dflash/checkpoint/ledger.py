"""The ledger: an append-only file of checkpoint transitions and rollbacks, written by the run's supervisor only.

Invariant: only legal transitions are appended, each as one synced line; a line torn by a kill stays one torn line and
is skipped by every reader. A checkpoint written again by a later segment starts anew.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from dflash.errors import DataError, RunStateError, SchemaVersionError
from dflash.records import CheckpointState, LedgerEntry, LedgerLine, RollbackEntry, from_json, to_json
from dflash.storage import append_line

logger = logging.getLogger(__name__)

LEGAL: Mapping[CheckpointState | None, frozenset[CheckpointState]] = {
    None: frozenset({"writing", "bad"}),
    "writing": frozenset({"durable", "bad"}),
    "durable": frozenset({"probation", "bad"}),
    "probation": frozenset({"clean", "suspect", "bad"}),
    "clean": frozenset({"suspect", "bad"}),
    "suspect": frozenset({"bad"}),
    "bad": frozenset(),
}
"""`clean` can be demoted when an onset is dated back; nothing but a new write leads out of `bad`."""

_ROLLBACK_MARK = b'"phase":"'
"""Only the lines about rollbacks have such a field; inside a text its quotes would be escaped."""


def is_legal(current: LedgerEntry | None, entry: LedgerEntry) -> bool:
    """Whether `entry` may follow `current`, the last entry of the same step."""
    if current is None or entry.segment > current.segment:
        return entry.state in LEGAL[None]
    return entry.segment == current.segment and entry.state in LEGAL[current.state]


def read_ledger(path: Path) -> list[LedgerLine]:
    """All lines in order; torn lines are skipped with a warning.

    Raises:
        SchemaVersionError: written by another version of the code.
    """
    if not path.is_file():
        return []
    entries: list[LedgerLine] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line:
            continue
        try:
            kind: type[LedgerEntry] | type[RollbackEntry] = RollbackEntry if _ROLLBACK_MARK in line else LedgerEntry
            entries.append(from_json(kind, line, origin=f"{path}:{number}"))
        except SchemaVersionError:
            raise
        except DataError as error:
            logger.warning("skipped a torn line of the ledger: %s", error.what)
    return entries


def current_states(entries: Iterable[LedgerLine]) -> dict[int, LedgerEntry]:
    """The last entry of every checkpoint's step."""
    return {entry.step: entry for entry in entries if isinstance(entry, LedgerEntry)}


def clean_steps(path: Path) -> tuple[int, ...]:
    """Steps whose checkpoint is clean now, ascending."""
    return tuple(sorted(step for step, entry in current_states(read_ledger(path)).items() if entry.state == "clean"))


class Ledger:
    """The writer's side: appends legal lines and knows the current state of every step."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._lines = read_ledger(path)
        self._current = current_states(self._lines)

    @property
    def lines(self) -> tuple[LedgerLine, ...]:
        """Everything, in the order of writing."""
        return tuple(self._lines)

    @property
    def current(self) -> Mapping[int, LedgerEntry]:
        """Last entry of every step."""
        return dict(self._current)

    def append(self, entry: LedgerEntry) -> None:
        """Append one transition durably.

        Raises:
            RunStateError: the transition is not legal.
        """
        before = self._current.get(entry.step)
        if not is_legal(before, entry):
            shown = "nothing" if before is None else f"{before.state} (segment {before.segment})"
            raise RunStateError(
                f"checkpoint step-{entry.step}: {shown} cannot become {entry.state} (segment {entry.segment})",
                remedy="two supervisors may be writing one ledger; let only one train this run",
            )
        self._write(entry)
        self._current[entry.step] = entry

    def append_rollback(self, entry: RollbackEntry) -> None:
        """Append one line about a rollback durably.

        Raises:
            RunStateError: an end without its beginning, or a beginning inside another rollback.
        """
        last = next((line for line in reversed(self._lines) if isinstance(line, RollbackEntry)), None)
        begun = None if last is None or last.phase != "begin" else last.plan.key
        if (entry.phase == "begin" and begun is not None) or (entry.phase == "end" and begun != entry.plan.key):
            before = "nothing" if begun is None else f"the beginning of {begun}"
            raise RunStateError(
                f"rollback {entry.plan.key}: `{entry.phase}` cannot follow {before}",
                remedy="two supervisors may be writing one ledger; let only one train this run",
            )
        self._write(entry)

    def _write(self, entry: LedgerLine) -> None:
        append_line(self._path, to_json(entry))
        self._lines.append(entry)
