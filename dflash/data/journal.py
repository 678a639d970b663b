"""The journal of generated answers: what makes a killed generation continue without repeating or losing an answer.

One JSON object a line; what is appended together is one write and synced before it counts. An answer is found again by a
digest of what decided it (the exact prompt ids, the limits, and the sample's key where answers are sampled), so it is never
reused for a prompt that it was not given to, and a renamed corpus finds its answers. Which target wrote it is the file's
name, by `answers_fingerprint`.

Invariants: every line that ends in a line break is whole; a last line without one was torn by a kill and is cut off. One
process writes at a time. Memory holds 16 bytes an answer, never its text: 1 M answers take 16 MB.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from dflash.errors import DataError
from dflash.records import to_json
from dflash.storage import disk_errors, fsync_dir

JOURNAL_SCHEMA_VERSION = 2

_DIGEST_BYTES = 16
_MERGE_ENTRIES = 1 << 16
"""New entries kept in a dictionary before they are merged into the sorted arrays."""


@dataclass(frozen=True, slots=True)
class AnswerEntry:
    """One generated answer.

    Attributes:
        digest: see `answer_digest`.
        conversation_id, turn: who asked first; for people, not for finding it.
        content: the answer as the message's content, without its stop token.
        reasoning: the part of it that the chat template wants apart, if any.
        prompt_tokens, tokens: of the prompt; generated, the stop token included.
        finish_reason: `stop`, or `length` if it was cut at the limit.
        exact: rendering the answer gives the very tokens that were generated.
    """

    digest: str
    conversation_id: str
    turn: int
    content: str
    reasoning: str | None
    prompt_tokens: int
    tokens: int
    finish_reason: Literal["stop", "length"]
    exact: bool
    schema_version: int = JOURNAL_SCHEMA_VERSION

    @property
    def finished(self) -> bool:
        """Whether a stop token was reached."""
        return self.finish_reason == "stop"


_DECODER = msgspec.json.Decoder(AnswerEntry)
_DIGEST_FORM = re.compile(f"[0-9a-f]{{{2 * _DIGEST_BYTES}}}")


def answer_digest(prompt_ids: Sequence[int], *, max_new_tokens: int, temperature: float, key: str) -> str:
    """What an answer is found by: 16 bytes (hex) of BLAKE2b over everything that decides it.

    Args:
        prompt_ids: the prompt.
        max_new_tokens: limit of the answer.
        temperature: 0 is greedy.
        key: of the sample; counts only where answers are sampled, so that equal prompts have one greedy answer.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    digest.update(f"{max_new_tokens}\0{float(temperature)}\0{key if temperature > 0 else ''}\0".encode())
    digest.update(np.asarray(prompt_ids, dtype="<i8").tobytes())
    return digest.hexdigest()


class AnswerJournal:
    """An append-only file of answers, locked and open for appending; use as a context manager.

    Raises:
        DataError: a line before the last is damaged, or another process writes into the file.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("a+b")
        try:
            _lock(self._file, path)
            self._index = _Index()
            for offset, line, number in _whole_lines(self._file):
                self._index.add(_parsed(line, f"{path}:{number}").digest, offset)
        except BaseException:
            self._file.close()
            raise
        fsync_dir(path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._index)

    def find(self, digest: str) -> AnswerEntry | None:
        """The first recorded answer with this digest, if there is one."""
        for offset in self._index.offsets(digest):
            self._file.seek(offset)
            entry = _parsed(self._file.readline(), f"{self._path} at byte {offset}")
            if entry.digest == digest:
                return entry
        return None

    def append(self, entries: Iterable[AnswerEntry]) -> None:
        """Record answers durably: they survive any kill after this returns.

        Raises:
            StorageError: the disk is full; the journal is closed then.
        """
        batch = [(entry.digest, (to_json(entry) + "\n").encode()) for entry in entries]
        offset = self._file.seek(0, os.SEEK_END)
        with disk_errors(f"record answers in {self._path}", remedy="free space there; all answers before these are kept"):
            try:
                self._file.write(b"".join(line for _, line in batch))
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError:
                with suppress(OSError):  # closing tries to write once more
                    self._file.close()
                raise
        for digest, line in batch:
            self._index.add(digest, offset)
            offset += len(line)


class _Index:
    """First eight bytes of a digest -> offsets of the lines that may hold it, ascending.

    Two sorted arrays for most entries, a dictionary for the newest. Two digests that agree in eight bytes are told apart by
    reading their lines.
    """

    def __init__(self) -> None:
        self._keys: NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
        self._offsets: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._new: dict[int, array[int]] = {}
        self._new_count = 0

    def __len__(self) -> int:
        return len(self._keys) + self._new_count

    def add(self, digest: str, offset: int) -> None:
        self._new.setdefault(_short(digest), array("q")).append(offset)
        self._new_count += 1
        if self._new_count >= _MERGE_ENTRIES:
            self._merge()

    def offsets(self, digest: str) -> Iterator[int]:
        key = np.uint64(_short(digest))
        first, stop = (int(np.searchsorted(self._keys, key, side=side)) for side in ("left", "right"))
        yield from self._offsets[first:stop].tolist()
        yield from self._new.get(int(key), ())

    def _merge(self) -> None:
        keys = [key for key, offsets in self._new.items() for _ in offsets]
        offsets = [offset for own in self._new.values() for offset in own]
        self._keys = np.concatenate([self._keys, np.array(keys, dtype=np.uint64)])
        self._offsets = np.concatenate([self._offsets, np.array(offsets, dtype=np.int64)])
        order = np.lexsort((self._offsets, self._keys))
        self._keys, self._offsets = self._keys[order], self._offsets[order]
        self._new, self._new_count = {}, 0


def _short(digest: str) -> int:
    return int(digest[:16], 16)


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by the kernel however the process ends
    except BlockingIOError as error:
        raise DataError(
            f"somebody else is writing answers into {path}", remedy="wait for it; its answers are found afterwards"
        ) from error


def _whole_lines(file: BinaryIO) -> Iterator[tuple[int, bytes, int]]:
    """(offset, line, number from 1) of every line that ends in a line break; cuts a torn last one off."""
    file.seek(0)
    offset = 0
    for number, line in enumerate(file, start=1):
        if not line.endswith(b"\n"):
            file.truncate(offset)
            return
        yield offset, line, number
        offset += len(line)


def _parsed(line: bytes, origin: str) -> AnswerEntry:
    try:
        entry = _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(origin, str(error)) from error
    if entry.schema_version != JOURNAL_SCHEMA_VERSION or not _DIGEST_FORM.fullmatch(entry.digest):
        raise _damaged(origin, f"schema version {entry.schema_version}, digest {entry.digest!r}")
    return entry


def _damaged(origin: str, fault: str) -> DataError:
    return DataError(
        f"the journal of answers is damaged at {origin}: {fault}",
        remedy="remove that line (its answer alone is generated again), or delete the file",
    )
