"""Answered conversations as a conversation file: what `source: files` reads back, with how each answer came about.

One JSON object a line: `id`, `kind`, `messages`, `tools` if there are any, `finish_reason` of the last answer (`stop`, or `length`
if it was cut), `exact` (rendering gives the very tokens that were generated) and `sampling`.

Invariant: the file is complete or absent. It is written beside the journal, put in its place in one step, and equal answers
give equal bytes, packed or not.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from dflash.data.answers_turns import AnsweredConversation
from dflash.records import Message
from dflash.storage import put_file

_PACKED_SUFFIX = ".gz"
_COMPRESSION_LEVEL = 6


class AnswersFile:
    """A conversation file in the making; use as a context manager.

    Args:
        output: where it goes: local path or `s3://` object; packed if it ends in `.gz`.
        partial: local file that is written first; its folder exists.
        sampling: how the answers were chosen; stored with every row.
    """

    def __init__(self, output: str, *, partial: Path, sampling: Mapping[str, Any]) -> None:
        self._output = output
        self._partial = partial
        self._sampling = sampling
        self._raw = partial.open("wb")
        self._file: BinaryIO | gzip.GzipFile = self._raw
        if output.endswith(_PACKED_SUFFIX):
            self._file = gzip.GzipFile("", "wb", _COMPRESSION_LEVEL, self._raw, mtime=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._file.close()
            self._raw.close()
        finally:
            self._partial.unlink(missing_ok=True)

    def add(self, answered: AnsweredConversation) -> None:
        """Write one conversation."""
        source = answered.conversation
        row: dict[str, Any] = {"id": source.id, "kind": source.kind, "messages": [_turn(message) for message in source.messages]}
        if source.tools:
            row["tools"] = source.tools
        row["finish_reason"] = "stop" if answered.finished else "length"
        row["exact"] = answered.exact
        row["sampling"] = self._sampling
        self._file.write((json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n").encode())

    def commit(self) -> None:
        """Put the complete file in its place.

        Raises:
            StorageError: the place cannot be written.
        """
        if self._file is not self._raw:
            self._file.close()
        self._raw.flush()
        os.fsync(self._raw.fileno())
        put_file(self._partial, self._output, only_if_absent=False)


def _turn(message: Message) -> dict[str, str]:
    turn = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        turn["reasoning_content"] = message.reasoning
    if message.name is not None:
        turn["name"] = message.name
    return turn
