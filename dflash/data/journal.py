"""The journal of generated answers: what makes a killed generation continue without repeating or losing an answer.

One JSON object a line; a batch is appended in one write and synced before it counts. Entries are found again by
conversation, turn and a hash of the exact prompt ids and sampling limits, so an answer is never reused for a prompt
that it was not given to.

Invariant: every line that ends in a line break is whole. A last line without one was torn by a kill and is cut off.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from dflash.errors import DataError
from dflash.records import from_json, to_json
from dflash.storage import fsync_dir

JOURNAL_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class AnswerEntry:
    """One generated answer.

    Attributes:
        conversation_id, turn: whose answer it is; `turn` counts the assistant turns of the conversation from 0.
        prompt_sha256: see `prompt_sha256`.
        text: the answer, without its stop token.
        tokens: tokens generated, the stop token included.
        finished: a stop token was reached.
        exact: rendering the answer gives the very tokens that were generated.
    """

    conversation_id: str
    turn: int
    prompt_sha256: str
    text: str
    tokens: int
    finished: bool
    exact: bool
    schema_version: int = JOURNAL_SCHEMA_VERSION

    @property
    def key(self) -> tuple[str, int, str]:
        """What an answer is found by."""
        return (self.conversation_id, self.turn, self.prompt_sha256)


def prompt_sha256(prompt_ids: Sequence[int], *, max_new_tokens: int, temperature: float) -> str:
    """SHA-256 (hex) of a prompt's ids and of what else decides the answer."""
    payload = json.dumps([max_new_tokens, float(temperature), list(prompt_ids)], separators=(",", ":"))
    return hashlib.sha256(payload.encode()).hexdigest()


class AnswerJournal:
    """An append-only file of answers, open for appending; use as a context manager.

    Raises:
        DataError: a line before the last is damaged.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._entries = {entry.key: entry for entry in _read_whole_lines(path)}
        self._file = path.open("ab")
        fsync_dir(path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def find(self, key: tuple[str, int, str]) -> AnswerEntry | None:
        """The recorded answer to exactly this prompt, if there is one."""
        return self._entries.get(key)

    def append(self, entries: Iterable[AnswerEntry]) -> None:
        """Record answers durably: they survive any kill after this returns."""
        batch = list(entries)
        self._file.write("".join(to_json(entry) + "\n" for entry in batch).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._entries.update((entry.key, entry) for entry in batch)


def _read_whole_lines(path: Path) -> list[AnswerEntry]:
    if not path.exists():
        return []
    content = path.read_bytes()
    whole_bytes = content.rfind(b"\n") + 1
    if whole_bytes < len(content):
        os.truncate(path, whole_bytes)
    entries = []
    for number, line in enumerate(content[:whole_bytes].split(b"\n")[:-1], start=1):
        try:
            entries.append(from_json(AnswerEntry, line, origin=f"{path}:{number}"))
        except DataError as error:
            raise DataError(
                f"the journal of answers is damaged: {error.what}", remedy=f"delete {path}; the answers are generated again"
            ) from error
    return entries
