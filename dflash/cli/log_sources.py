"""Logs that lie elsewhere: objects in S3 and files behind ssh, as the sources that the health room reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dflash.errors import DataError
from dflash.health import LocalLog, LogSource, Piece
from dflash.storage import RemoteFile, Store, is_ssh, open_store, remote_file

LOG_NAME = "train_log.jsonl"
CONFIG_NAME = "config.yaml"
_LARGEST_CONFIG_BYTES = 2**20


class PlacedLog(LogSource, Protocol):
    """A source that also knows the configuration lying beside the log."""

    def beside(self, name: str) -> bytes | None:
        """Content of a small file in the same folder; None if there is none."""


class LocalPlace(LocalLog):
    """A file on this machine and its folder."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._folder = path.parent

    def beside(self, name: str) -> bytes | None:
        """See `PlacedLog`."""
        file = self._folder / name
        return file.read_bytes() if file.is_file() else None


@dataclass(frozen=True, slots=True)
class StoreLog:
    """An object of a store, read by ranges."""

    store: Store
    object_name: str

    @property
    def name(self) -> str:
        """Its address."""
        return f"{self.store.uri}/{self.object_name}"

    def read_at(self, offset: int, *, before: int, max_bytes: int) -> Piece | None:
        """See `LogSource`; an object that is replaced between two readings shows in the bytes before the offset."""
        size_bytes = self.store.size(self.object_name)
        if size_bytes is None:
            return None
        if size_bytes < offset:
            return Piece(0, b"", b"")
        length = before + min(max_bytes, size_bytes - offset)
        data = self.store.read_range(self.object_name, start=offset - before, length=length) if length else b""
        return Piece(0, data[:before], data[before:])

    def beside(self, name: str) -> bytes | None:
        """See `PlacedLog`."""
        size_bytes = self.store.size(name)
        return self.store.read(name) if size_bytes is not None and size_bytes <= _LARGEST_CONFIG_BYTES else None


@dataclass(frozen=True, slots=True)
class SshLog:
    """A file behind ssh: one command a reading."""

    file: RemoteFile

    @property
    def name(self) -> str:
        """Its address."""
        return self.file.uri

    def read_at(self, offset: int, *, before: int, max_bytes: int) -> Piece | None:
        """See `LogSource`."""
        data = self.file.read(start=offset - before, length=before + max_bytes)
        return None if data is None else Piece(0, data[:before], data[before:])

    def beside(self, name: str) -> bytes | None:
        """See `PlacedLog`."""
        return self.file.sibling(name).read(start=0, length=_LARGEST_CONFIG_BYTES)


def source_of(address: str, *, remote_prefix: tuple[str, ...]) -> PlacedLog:
    """The log that an address names: a path, `s3://bucket/key` or `ssh://host/path`; in a folder, its train_log.jsonl.

    Raises:
        DataError: there is no such log.
        StorageError: the address is malformed, or its machine or store does not answer.
    """
    if is_ssh(address):
        return SshLog(remote_file(address, prefix=remote_prefix))
    if address.startswith("s3://"):
        return _object(address)
    path = Path(address)
    if path.is_dir():
        inside = path / LOG_NAME
        if not inside.is_file():
            raise DataError(f"{path} is a folder without {LOG_NAME}", remedy="give a run's folder, or the path of a log")
        return LocalPlace(inside)
    if not path.exists():
        raise DataError(f"there is no log {path}", remedy="give a run's folder, a log's path, s3://bucket/key or ssh://host/path")
    return LocalPlace(path)


def _object(address: str) -> StoreLog:
    folder, _, name = address.rstrip("/").rpartition("/")
    if folder in ("s3:/", "s3:"):
        raise DataError(f"{address} names a bucket, not a log", remedy="write s3://bucket/folder/train_log.jsonl")
    found = StoreLog(open_store(folder), name)
    if found.store.size(name) is None:
        inside = StoreLog(open_store(address.rstrip("/")), LOG_NAME)
        if inside.store.size(LOG_NAME) is not None:
            return inside
        raise DataError(f"there is no log {address}", remedy="check the bucket and the key")
    return found
