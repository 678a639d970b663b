"""Text for a terminal: tables, bars, and names from a config or a path that can never move the cursor or forge a line."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import IO, Any

_PRINT_THEMSELVES = frozenset({"transformers", "huggingface_hub"})
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def clean_text(text: str) -> str:
    """Replace control, format, surrogate and line-separating characters by `?`."""
    return "".join("?" if unicodedata.category(char) in {"Cc", "Cf", "Cs", "Zl", "Zp"} else char for char in text)


def terminal_text(text: str) -> str:
    """Lines that can be shown as they are: `clean_text` on each, tabs become spaces."""
    return "\n".join(clean_text(line) for line in text.expandtabs().split("\n"))


class OneRecord(logging.Formatter):
    """A record's further lines are indented and its control characters shown as `?`: no value can forge a record."""

    def format(self, record: logging.LogRecord) -> str:
        """One record as the lines that are shown."""
        return terminal_text(super().format(record)).replace("\n", "\n  ")


def clean_library_records() -> None:
    """Clean the records of libraries that print by handlers of their own where they are made, as `OneRecord` cleans ours.

    transformers repeats keys of a configuration and names of tensors. A second call changes nothing.
    """
    make = logging.getLogRecordFactory()
    if isinstance(make, _CleanRecords):
        return
    logging.setLogRecordFactory(_CleanRecords(make))


class _CleanRecords:
    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self._make = make

    def __call__(self, name: str, *rest: Any, **more: Any) -> logging.LogRecord:
        record = self._make(name, *rest, **more)
        if str(name).partition(".")[0] in _PRINT_THEMSELVES:
            with contextlib.suppress(TypeError, ValueError):  # arguments that do not fit: logging itself says so
                plain = _COLOURS.sub("", record.getMessage())
                record.msg, record.args = terminal_text(plain).replace("\n", "\n  "), None
        return record


def to_nowhere(stream: IO[str]) -> None:
    """Nobody reads `stream` any more: what is still written or flushed to it, also at the process's end, goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def aligned(table: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Rows of a table as lines: the first `left` columns on the left, the others on the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            _placed(cell, width, column < left) for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def _placed(cell: str, width: int, left: bool) -> str:
    return cell.ljust(width) if left else cell.rjust(width)


def bar(frac: float, *, width: int) -> str:
    """A bar of `width` characters that is filled in proportion to `frac` (0..1)."""
    filled = round(min(max(frac, 0.0), 1.0) * width)
    return "#" * filled + "." * (width - filled)
