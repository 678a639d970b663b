"""Putting a finished folder in the place of another one.

Invariant: a reader that opens the place finds the old folder or the new one, complete, at every moment.
Hard decision: Linux can exchange two names in one step (`renameat2` with RENAME_EXCHANGE), and that is what happens where the
file system knows it. Elsewhere two renames leave a moment without the folder; the old one then lies beside it under a name
that `recover` finds, so a crash in that moment loses nothing.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
from pathlib import Path

logger = logging.getLogger(__name__)

PARTIAL_MARK = ".partial-"
REPLACED_SUFFIX = ".replaced"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NOT_SUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV)


def partial_path(final: Path) -> Path:
    """Where this process builds the folder that will become `final`."""
    return final.with_name(f"{final.name}{PARTIAL_MARK}{os.getpid()}")


def replace_folder(finished: Path, final: Path) -> None:
    """Give a finished, synced folder its final name; what stood there is gone afterwards.

    Args:
        finished: complete folder on the same file system.
        final: name to give it.
    """
    if not final.exists():
        finished.rename(final)
    elif exchange(finished, final):
        shutil.rmtree(finished)
    else:
        replaced = final.with_name(final.name + REPLACED_SUFFIX)
        final.rename(replaced)
        finished.rename(final)
        shutil.rmtree(replaced)
    _sync_folder(final.parent)


def recover(final: Path) -> None:
    """Undo what a killed replacement left: an old folder without its name, and half-built folders of dead processes."""
    replaced = final.with_name(final.name + REPLACED_SUFFIX)
    if replaced.is_dir():
        if final.exists():
            shutil.rmtree(replaced)
        else:
            logger.warning("%s was being replaced when its writer died; the old one is back", final)
            replaced.rename(final)
    for leftover in final.parent.glob(f"{final.name}{PARTIAL_MARK}*"):
        owner = leftover.name.rpartition("-")[2]
        if owner.isdigit() and not _lives(int(owner)):
            shutil.rmtree(leftover)


def exchange(first: Path, second: Path) -> bool:
    """Swap the names of two existing folders in one step.

    Returns:
        False where the system or the file system cannot do that; nothing has changed then.

    Raises:
        OSError: it can, and something else went wrong.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_SUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(second))


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
