r"""Rows of JSON text without parsing it: lines, or the elements of one long list.

Elements are found by their brackets and commas outside strings; whether an element is valid JSON is the reader's question,
so a faulty one spoils no other. Strings, the bulk of conversations, are skipped at the speed of a regular expression.

Invariant: text is split at `\n` only (a carriage return or a Unicode separator inside a string never splits a row), memory
holds one row and one chunk, and a row above MAX_ROW_BYTES is reported by its size, not held.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from dflash.errors import DataError

MAX_ROW_BYTES = 32 * 2**20
"""Longest row; a thousand times a long conversation, so more is a missing line break or a dump of something else."""

LIST_KEYS = ("data", "rows")
"""Keys under which an object may hold the list of rows."""

_TOKENS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{},]', re.DOTALL)
_STRING_END = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class OversizedRow:
    """A row that was too large to be held."""

    size_bytes: int


def text_lines(chunks: Iterable[bytes]) -> Iterator[bytes | OversizedRow]:
    r"""Lines without their `\n`; the last one may lack it."""
    held: list[bytes] = []
    size = 0
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        size += len(first)
        held.append(first)
        if size > MAX_ROW_BYTES:
            held.clear()
        if not others:
            continue
        yield _held_row(held, size)
        yield from (_held_row([line], len(line)) for line in others[:-1])
        held, size = [others[-1]], len(others[-1])
    if size:
        yield _held_row(held, size)


def list_rows(uri: str, chunks: Iterable[bytes], *, start: int, alone: bool) -> Iterator[bytes | OversizedRow]:
    """Elements of a JSON list as their text.

    Args:
        uri: names the file in errors.
        chunks: its content.
        start: byte at or before the opening bracket, in the first chunk.
        alone: the list is not the value of an object's key.

    Raises:
        DataError: the content ends inside the list or its object, or goes on after it.
    """
    content = iter(chunks)
    scanner = _ListScanner(start)
    yield from _scanned(scanner, content)
    found, inside = scanner.found, "list of rows, after"
    if scanner.finished and not alone:
        # To the scanner the object's other keys are as good as elements.
        behind, scanner, inside = scanner.rest, _ListScanner(0), "object, behind"
        deque(_scanned(scanner, chain([b"[" + behind], content)), maxlen=0)
    if not scanner.finished:
        raise DataError(
            f"{uri} ends inside its {inside} {found} whole ones",
            remedy="fetch the file again, or mend the row with the unbalanced bracket or quote",
        )
    _check_nothing_follows(uri, chain([scanner.rest], content), found=found)


def list_offset(head: bytes, keys: tuple[str, ...]) -> int | None:
    """Where, in the first bytes of an object, the list under one of `keys` opens; None if none does."""
    text = head.decode("latin-1")  # one character a byte: only places and ASCII keys matter here
    decoder = json.JSONDecoder()
    at = _skip(text, _skip(text, 0) + 1)
    while text[at : at + 1] == '"':
        try:
            key, at = decoder.raw_decode(text, at)
            at = _skip(text, at)
            if text[at : at + 1] != ":":
                return None
            at = _skip(text, at + 1)
            if key in keys and text[at : at + 1] == "[":
                return at
            _, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        at = _skip(text, at)
        if text[at : at + 1] != ",":
            return None
        at = _skip(text, at + 1)
    return None


def _scanned(scanner: _ListScanner, chunks: Iterator[bytes]) -> Iterator[bytes | OversizedRow]:
    """Elements up to the list's end, if there is one; no chunk behind it is taken."""
    for chunk in chunks:
        yield from scanner.feed(chunk)
        if scanner.finished:
            return


class _ListScanner:
    """Finds the elements of a list in chunks of text."""

    def __init__(self, start: int) -> None:
        self.finished = False
        self.found = 0
        self._buffer = b""
        self._position = start
        self._element = start  # where the current element begins
        self._dropped = 0  # bytes of the current element that are no longer held
        self._depth = 0
        self._in_string = False

    def feed(self, chunk: bytes) -> Iterator[bytes | OversizedRow]:
        """The elements that `chunk` completes."""
        self._buffer += chunk
        if self._in_string and not self._leave_string():
            self._forget()
            return
        for token in _TOKENS.finditer(self._buffer, self._position):
            at = token.start()
            mark = self._buffer[at : at + 1]
            if mark == b'"':
                if token.end() == at + 1:  # the string goes on in the next chunk
                    self._in_string = True
                    self._position = at + 1
                    self._leave_string()
                    self._forget()
                    return
            elif mark in b"[{":
                self._depth += 1
                if self._depth == 1:
                    self._element = at + 1
            elif self._depth == 1 and mark in b",]}":
                yield from self._completed(at)
                if mark != b",":
                    self.finished = True
                    self._position = at + 1
                    return
            elif mark in b"]}":
                self._depth -= 1
        self._position = len(self._buffer)
        self._forget()

    @property
    def rest(self) -> bytes:
        """What follows the list in the chunks so far."""
        return self._buffer[self._position :]

    def _completed(self, end: int) -> Iterator[bytes | OversizedRow]:
        size = end - self._element + self._dropped
        row = self._buffer[self._element : end].strip()
        self._element, self._dropped = end + 1, 0
        if size > MAX_ROW_BYTES:
            self.found += 1
            yield OversizedRow(size)
        elif row:
            self.found += 1
            yield row

    def _leave_string(self) -> bool:
        """Go to the end of the string that the position is in, if it is there yet."""
        end = _STRING_END.match(self._buffer, self._position)
        if end is None:
            backslashes = len(self._buffer) - len(self._buffer.rstrip(b"\\"))
            # Not behind a backslash whose character is still to come; all of them, as the string may have begun with them.
            self._position = max(self._position, len(self._buffer) - backslashes)
            return False
        self._in_string = False
        self._position = end.end()
        return True

    def _forget(self) -> None:
        """Drop what is no longer needed: finished elements, and all that was read of an element that is too large."""
        keep = self._element
        if self._position - keep + self._dropped > MAX_ROW_BYTES:
            self._dropped += self._position - keep
            self._element = keep = self._position
        self._buffer = self._buffer[keep:]
        self._position -= keep
        self._element -= keep


def _check_nothing_follows(uri: str, chunks: Iterable[bytes], *, found: int) -> None:
    """A second list, or rows behind a bracket too many, must not be lost silently."""
    for chunk in chunks:
        text = chunk.strip(_SPACE.encode())
        if text:
            raise DataError(
                f"{uri} goes on after its list of {found} rows: {text[:40].decode('utf-8', errors='replace')!r}",
                remedy="write one list a file, or one row a line in a file named .jsonl; or mend the row with the bracket too many",
            )


def _held_row(held: list[bytes], size: int) -> bytes | OversizedRow:
    return OversizedRow(size) if size > MAX_ROW_BYTES else b"".join(held)


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at
