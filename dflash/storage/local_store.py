"""A store in a local folder: hard links and renames give it the promises that S3 gives by conditional puts.

Invariant: see `dflash.storage.local`: a name appears by one link or rename of synced bytes, and folders are synced after it.
Hard decision: `put_file` links the given file instead of copying it (a shard is written once, and half a terabyte is not
copied to be renamed); across file systems it copies.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from dflash.errors import StorageError
from dflash.storage.local import atomic_write_bytes, create_exclusively, fsync_dir
from dflash.storage.names import check_name

_TEMPORARY_SUFFIX = ".tmp"


class LocalStore:
    """Objects as files below a folder, which is made when the first one is put."""

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.abspath(root))  # noqa: PTH100 - resolve() would follow links that a person set on purpose

    @property
    def uri(self) -> str:
        """Absolute path."""
        return str(self._root)

    @property
    def local_root(self) -> Path:
        """The folder."""
        return self._root

    def read(self, name: str) -> bytes:
        """Whole content."""
        with self._reading(name) as path:
            return path.read_bytes()

    def read_range(self, name: str, *, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start`."""
        with self._reading(name) as path, path.open("rb") as file:
            file.seek(start)
            data = file.read(length)
        if len(data) != length:
            raise StorageError(
                f"{path} ends at byte {start + len(data)}, {start + length} are asked for", remedy="restore the file"
            )
        return data

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if it is absent."""
        with self._reading(name) as path:
            try:
                found = path.stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
        return found.st_size if path.is_file() else None

    def put(self, name: str, data: bytes, *, only_if_absent: bool) -> bool:
        """Write a file durably and atomically."""
        path = self._prepared(name)
        if only_if_absent:
            return create_exclusively(path, data)
        atomic_write_bytes(path, data)
        return True

    def put_file(self, name: str, local: Path, *, only_if_absent: bool) -> bool:
        """Link (or copy, from another file system) a file into the store; it must not be changed afterwards."""
        path = self._prepared(name)
        if only_if_absent and path.exists():
            return False
        try:
            with _synced_twin(local, folder=path.parent) as twin:
                if only_if_absent:
                    try:
                        path.hardlink_to(twin)
                    except FileExistsError:
                        return False
                else:
                    twin.replace(path)
        except OSError as error:
            raise StorageError(
                f"cannot put {local} at {path}: {error.strerror}", remedy="check both paths, their permissions and free space"
            ) from error
        fsync_dir(path.parent)
        return True

    def names(self, prefix: str) -> Iterator[str]:
        """Names that start with `prefix`, sorted by code point; files in the making are left out."""
        head = check_name(prefix.removesuffix("/"), uri=self.uri).rpartition("/")[0] if prefix else ""
        found = (
            path.relative_to(self._root)
            for path in (self._root / head).rglob("*")
            if path.is_file()  # not a folder, and not gone since
        )
        names = sorted(path.as_posix() for path in found if not any(_in_the_making(part) for part in path.parts))
        yield from (name for name in names if name.startswith(prefix))

    def open(self, name: str) -> BinaryIO:
        """The file, open for reading."""
        with self._reading(name) as path:
            return path.open("rb")

    def delete(self, name: str) -> None:
        """Remove a file; an absent one is fine."""
        path = self._path(name)
        try:
            path.unlink()
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise StorageError(f"cannot remove {path}: {error.strerror}", remedy="check its permissions") from error
        fsync_dir(path.parent)

    def _path(self, name: str) -> Path:
        return self._root / check_name(name, uri=self.uri)

    def _prepared(self, name: str) -> Path:
        """The path of a name, its folder made durably."""
        path = self._path(name)
        try:
            _make_folder(path.parent)
        except OSError as error:
            raise StorageError(
                f"cannot make the folder {path.parent}: {error.strerror}", remedy="check that its parent is a writable folder"
            ) from error
        return path

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[Path]:
        path = self._path(name)
        try:
            yield path
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}", remedy="check the path and its permissions") from error


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    fsync_dir(folder.parent)


@contextlib.contextmanager
def _synced_twin(local: Path, *, folder: Path) -> Iterator[Path]:
    """A second name in `folder` for the bytes of `local`, which are on disk; gone afterwards unless it was renamed."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".put.", suffix=_TEMPORARY_SUFFIX) as made:
        twin = Path(made) / local.name
        try:
            twin.hardlink_to(local)
        except OSError:
            # Another file system, or one without hard links.
            shutil.copyfile(local, twin)
        with twin.open("rb") as file:
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        yield twin


def _in_the_making(part: str) -> bool:
    return part.startswith(".") and part.endswith(_TEMPORARY_SUFFIX)
