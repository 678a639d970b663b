"""Errors a person meets: each says what is wrong, which value it was, and what to do.

Every error of the package derives from `DflashError` and carries the exit code of the command that
meets it. `assert` is kept for invariants of our own code; anything that input can cause is one of these.
"""

from __future__ import annotations

import errno
from typing import Any

EXIT_OK = 0
EXIT_USER_ERROR = 1
EXIT_WATCH = 3  # the run's log shows something worth a look, nothing is damaged
EXIT_UNHEALTHY = 4  # the run's log shows damage
EXIT_BLIND = 5  # the log says too little to judge: blind is not healthy
EXIT_HALTED = 21  # the run was stopped by a decision and must not be restarted as if it had crashed
EXIT_NONFINITE = 23  # too many non-finite updates in a row
EXIT_INTERRUPTED = 24  # the trainer was asked to stop and saved its state first
EXIT_TRAINER_CRASHED = 25  # the trainer died more often than it may be started again
EXIT_NOT_LOSSLESS = 26  # speculative decoding returned other tokens than plain decoding
EXIT_SIGINT = 130  # Ctrl-C, as shells count it


class DflashError(Exception):
    """Base of every error this package raises on purpose.

    Args:
        what: one sentence that names the problem and the offending value.
        remedy: one sentence that says what to do about it.
    """

    exit_code = EXIT_USER_ERROR

    def __init__(self, what: str, *, remedy: str) -> None:
        super().__init__(what, remedy)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}\n  -> {self.remedy}"

    def __reduce__(self) -> tuple[Any, ...]:
        # The stock way calls the class with `args` alone, which no keyword argument survives: errors cross processes.
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[DflashError], args: tuple[object, ...], state: dict[str, Any]) -> DflashError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(DflashError):
    """The configuration is not valid."""


class DataError(DflashError):
    """Conversations, shards or a batch plan are missing or malformed."""


class SchemaVersionError(DataError):
    """A file was written with another schema version than this code reads."""


class StorageError(DflashError):
    """A file or object cannot be read or written."""


class TargetError(DflashError):
    """The target model cannot be used as configured."""


class ServerError(DflashError):
    """The server that runs the target is away, or fails at every prompt; asking again later may help."""


class DrafterError(DflashError):
    """The drafter's shape or weights do not fit."""


class DeviceError(DflashError):
    """The machine lacks the devices that the configuration asks for."""


class PreflightError(DflashError):
    """The doctor found something that would spoil the run."""


class CheckpointError(DflashError):
    """A checkpoint is missing, incomplete or damaged."""


class RunStateError(DflashError):
    """A run's folder is in a state that forbids the requested action."""


class TrackingError(DflashError):
    """The MLflow store cannot be used."""


class EvaluationError(DflashError):
    """An evaluation cannot be carried out as configured."""


class NotLosslessError(EvaluationError):
    """Speculative decoding and plain decoding disagree beyond the near-tie rule."""

    exit_code = EXIT_NOT_LOSSLESS


class UnhealthyError(DflashError):
    """The health check found damage."""

    exit_code = EXIT_UNHEALTHY


class HaltedError(DflashError):
    """The run was halted by a decision."""

    exit_code = EXIT_HALTED


class NonFiniteLimitError(DflashError):
    """Too many updates in a row were skipped because they were not finite."""

    exit_code = EXIT_NONFINITE


class InterruptedRunError(DflashError):
    """The trainer was asked to stop; its state is saved."""

    exit_code = EXIT_INTERRUPTED


class TrainerCrashedError(DflashError):
    """The trainer process died and may not be started again."""

    exit_code = EXIT_TRAINER_CRASHED


_NO_FAULT_OF_OURS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def as_storage_error(error: OSError) -> StorageError | None:
    """What the operating system refused where no finer error was at hand, with a remedy: a command's last resort.

    Returns:
        The error to tell; None if it names no file and tells of no disk, so that it may be a fault of the program.
    """
    if error.filename is None and error.errno not in _NO_FAULT_OF_OURS:
        return None
    place = "a file" if error.filename is None else error.filename
    return StorageError(f"cannot use {place}: {error.strerror}", remedy="check the path, its permissions, and the room on its disk")
