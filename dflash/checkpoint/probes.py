"""What acceptance probes say about checkpoints: an append-only file of outcomes, and pure questions about it.

Invariant: one process appends (it holds the lock), anyone reads; every probe that was begun gets one outcome, or its process
died. A line torn by a kill is skipped. A checkpoint is known by (step, segment): one that is written again starts anew.
The hard decision: a missing probe is unknown and keeps a checkpoint in probation, but one that failed or was passed over is an
outcome and does not: a broken probe may never keep a run from having checkpoints to return to.
"""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dflash.errors import DataError, RunStateError, SchemaVersionError
from dflash.records import LedgerEntry, ProbeRecord, RunPaths, from_json, to_json
from dflash.storage import append_line

logger = logging.getLogger(__name__)

Checkpoint = tuple[int, int]
"""(step, segment)."""


@dataclass(frozen=True, slots=True)
class ProbeView:
    """What the verdict on a checkpoint has to know of probes.

    Attributes:
        lengths: acceptance length of the probed checkpoints.
        awaited: those without a verdict whose probe is due and has no outcome yet.
        given_up: those that got an outcome without figures, and why.
        min_frac: share of the best clean acceptance length before it that a checkpoint must reach.
    """

    lengths: Mapping[Checkpoint, float] = field(default_factory=dict)
    awaited: frozenset[Checkpoint] = frozenset()
    given_up: Mapping[Checkpoint, str] = field(default_factory=dict)
    min_frac: float = 1.0


def probe_is_due(step: int, *, every_steps: int, interval_steps: int) -> bool:
    """Whether `step` is the first save at or behind a multiple of `every_steps`; never for step 0 or without probes."""
    if not every_steps or step == 0:
        return False
    save_before = (step - 1) // interval_steps * interval_steps
    return step // every_steps > save_before // every_steps


def read_probes(path: Path) -> list[ProbeRecord]:
    """All lines in order; torn ones are skipped.

    Raises:
        SchemaVersionError: written by another version of the code.
    """
    if not path.is_file():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line:
            try:
                records.append(from_json(ProbeRecord, line, origin=f"{path}:{number}"))
            except SchemaVersionError:
                raise
            except DataError as error:
                logger.debug("skipped a torn line of the probes: %s", error.what)
    return records


def outcomes(records: Sequence[ProbeRecord]) -> dict[Checkpoint, ProbeRecord]:
    """The last outcome of every checkpoint; figures of other prompts or settings than the newest ones' do not count."""
    settings = next((record.prompts_sha256 for record in reversed(records) if record.figures is not None), None)
    return {
        (record.step, record.segment): record
        for record in records
        if record.outcome != "begun" and (record.figures is None or record.prompts_sha256 == settings)
    }


def tries(records: Sequence[ProbeRecord], checkpoint: Checkpoint, *, prompts_sha256: str) -> int:
    """How often a checkpoint's probe was begun without any outcome since."""
    count = 0
    for record in records:
        if (record.step, record.segment) == checkpoint and record.prompts_sha256 == prompts_sha256:
            count = count + 1 if record.outcome == "begun" else 0
    return count


def probe_view(
    records: Sequence[ProbeRecord], current: Mapping[int, LedgerEntry], *, due: Sequence[int], min_frac: float
) -> ProbeView:
    """Sum the outcomes up for the ledger's checkpoints.

    Args:
        records: lines of the probes' file.
        current: last ledger entry of every step.
        due: steps whose checkpoints are to be probed.
        min_frac: see `ProbeView`.
    """
    found = outcomes(records)
    entries = [current[step] for step in due if step in current]
    unsettled = {(entry.step, entry.segment) for entry in entries if entry.state in ("durable", "probation")}
    return ProbeView(
        lengths={key: record.figures.acceptance_length for key, record in found.items() if record.figures is not None},
        awaited=frozenset(unsettled - found.keys()),
        given_up={key: f"{record.outcome}: {record.reason}" for key, record in found.items() if record.figures is None},
        min_frac=min_frac,
    )


class ProbeFile:
    """The probes of a run as somebody sees them who looks often: the file only grows, so one of the same size is not read again.

    Attributes:
        records: all lines up to the last look.
        size_bytes: of the file then.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.records: list[ProbeRecord] = []
        self.size_bytes = 0

    def poll(self) -> bool:
        """Read the file if there is anything new in it; returns whether there was.

        Raises:
            SchemaVersionError: written by another version of the code.
        """
        try:
            size_bytes = self._path.stat().st_size
        except FileNotFoundError:
            size_bytes = 0
        if size_bytes == self.size_bytes:
            return False
        self.records = read_probes(self._path)
        self.size_bytes = size_bytes
        return True


class ProbeWriter:
    """The probing process's side: appends durable lines. Made by `hold_probes`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, record: ProbeRecord) -> None:
        """Append one line durably."""
        append_line(self._path, to_json(record))


class ProbesHeldError(RunStateError):
    """Another process probes the run's checkpoints."""


@contextmanager
def hold_probes(paths: RunPaths) -> Iterator[ProbeWriter]:
    """Be the run's one probing process while the block runs.

    Raises:
        ProbesHeldError: another one is.
    """
    paths.probe_dir.mkdir(parents=True, exist_ok=True)
    with paths.probe_lock.open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ProbesHeldError(
                f"the checkpoints of run {paths.root} are being probed by another process",
                remedy="let it finish: it probes every checkpoint that is due",
            ) from error
        yield ProbeWriter(paths.probes)
