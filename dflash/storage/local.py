"""Durable local files: a reader sees the old content or the new, never a mixture, and a crash loses neither.

Invariant: a name appears (or changes its content) only by a rename of a file whose bytes are already on disk,
and the folder is synced after the rename, so an existing name means complete content.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dflash.errors import StorageError

HASH_CHUNK_BYTES = 1 << 20
"""Bytes read at once while hashing: big enough that the hash, not the call, is the cost."""

_DISK_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOTDIR, errno.EISDIR}
)


def fsync_dir(path: Path) -> None:
    """Put a folder's own entries (creations, renames, deletions) on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by `data` atomically and durably; its folder must exist.

    Raises:
        StorageError: the folder is missing or cannot be written.
    """
    with _temporary_beside(path, data) as temporary:
        temporary.replace(path)
    fsync_dir(path.parent)


def atomic_write_text(path: Path, text: str) -> None:
    """Replace `path` by UTF-8 `text` atomically and durably; see `atomic_write_bytes`."""
    atomic_write_bytes(path, text.encode("utf-8"))


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Wait until nobody else is in such a block with the same lock file (made if absent); it is free again however a process ends.

    Raises:
        StorageError: the file cannot be opened or locked.
    """
    with contextlib.ExitStack() as stack:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(lock.open("ab"))
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise StorageError(
                f"{lock} cannot be locked: {error.strerror}", remedy="make its folder writable, on a disk with room and file locks"
            ) from error
        yield


def append_line(path: Path, text: str) -> None:
    r"""Append one line durably; its folder must exist.

    A line that a kill has torn stays one torn line, because this one then starts with `\n`. It is one write on a file opened for
    appending, so the lines of several processes do not mix.

    Raises:
        OSError: the disk refuses; a part of the line may be there.
    """
    created = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        size_bytes = os.fstat(descriptor).st_size
        torn = size_bytes > 0 and os.pread(descriptor, 1, size_bytes - 1) != b"\n"
        line = memoryview((b"\n" if torn else b"") + text.encode() + b"\n")
        while line:
            line = line[os.write(descriptor, line) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if created:
        fsync_dir(path.parent)


@contextlib.contextmanager
def disk_errors(doing: str, *, remedy: str) -> Iterator[None]:
    """Say in words what a full or unwritable disk means for a block that writes plain files.

    Args:
        doing: what the block does, with the place: `write unfinished files in /data`.
        remedy: what to do about it.

    Raises:
        StorageError: in place of such an OSError; any other error passes.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        raise StorageError(f"cannot {doing}: {os.strerror(error.errno)}", remedy=remedy) from error


def create_exclusively(path: Path, data: bytes) -> bool:
    """Create `path` with `data` unless it exists.

    Returns:
        Whether this call created it: of any number of callers exactly one gets True.

    Raises:
        StorageError: the folder is missing or cannot be written.
    """
    with _temporary_beside(path, data) as temporary:
        try:
            # A hard link fails where a rename would silently replace.
            path.hardlink_to(temporary)
        except FileExistsError:
            return False
    fsync_dir(path.parent)
    return True


@contextlib.contextmanager
def _temporary_beside(path: Path, data: bytes) -> Iterator[Path]:
    """A synced file with `data` in the folder of `path`, gone afterwards unless it was renamed."""
    temporary: Path | None = None
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        temporary = Path(name)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), 0o644)  # mkstemp makes files private; a run's folder is for every reader
            os.fsync(file.fileno())
        yield temporary
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror}", remedy="check that the folder exists, is writable and has free space"
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def sha256_file(path: Path) -> str:
    """SHA-256 (hex) of a file's content, read in chunks.

    Raises:
        StorageError: the file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(HASH_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}", remedy="check the path and its permissions") from error
    return digest.hexdigest()
