"""How a trainer process ended, told by itself: torchrun turns every failure into exit code 1.

Invariant: no file means that the process died (a crash, which may be restarted); an error in it is one of the package's
own and would happen again, so it is raised in the supervisor and never restarted.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash import errors
from dflash.errors import DataError, DflashError
from dflash.records import RunPaths, from_json, to_json
from dflash.storage import atomic_write_text

EXIT_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class TrainerExit:
    """One end of the trainer.

    Attributes:
        error: class name of the `DflashError`, None after a finished training.
        what, remedy: its texts.

    """

    segment: int
    error: str | None
    what: str
    remedy: str
    schema_version: int = EXIT_SCHEMA_VERSION


def write_exit(paths: RunPaths, *, segment: int, error: DflashError | None) -> None:
    """Record how this process ends."""
    record = TrainerExit(
        segment=segment,
        error=None if error is None else type(error).__name__,
        what="" if error is None else error.what,
        remedy="" if error is None else error.remedy,
    )
    atomic_write_text(paths.trainer_exit, to_json(record, indent=2))


def read_exit(paths: RunPaths, *, segment: int) -> TrainerExit | None:
    """What the trainer of `segment` said; None if it died without a word."""
    if not paths.trainer_exit.is_file():
        return None
    try:
        record = from_json(TrainerExit, paths.trainer_exit.read_bytes(), origin=str(paths.trainer_exit))
    except DataError:
        return None
    return record if record.segment == segment else None


def error_of(record: TrainerExit) -> DflashError | None:
    """The error of a recorded end, as an exception of the same class."""
    if record.error is None:
        return None
    kind = getattr(errors, record.error, DflashError)
    error: DflashError = kind(record.what, remedy=record.remedy)
    return error
