"""Text for a terminal: tables, bars, and names from a config or a path that can never move the cursor or forge a line."""

from __future__ import annotations

import logging
import os
import unicodedata
from collections.abc import Sequence
from typing import IO


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
