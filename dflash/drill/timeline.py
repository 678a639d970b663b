"""What happens in a drill, line by line as it happens: 80 columns, no control characters, the same text in a file."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass

WIDTH = 80
_INDENT = 18
HEADING = f"{'time':>7}  {'step':>6}   what happened"


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened.

    Attributes:
        at_s: wall time.
        step: step of the training concerned, None where there is none.
    """

    at_s: float
    step: int | None
    text: str


class Timeline:
    """Prints moments as lines, with the time since the drill began.

    Args:
        begun_s: wall time of the drill's beginning.
        write: takes one finished line without its newline.
    """

    def __init__(self, begun_s: float, *, write: Callable[[str], None]) -> None:
        self._begun_s = begun_s
        self._write = write
        self.moments: list[Moment] = []

    def heading(self, title: str) -> None:
        """Print what the drill is about."""
        for line in (*textwrap.wrap(title, WIDTH), "", HEADING):
            self._write(line)

    def add(self, moment: Moment) -> None:
        """Print a moment."""
        self.moments.append(moment)
        for line in lines_of(moment, begun_s=self._begun_s):
            self._write(line)


def lines_of(moment: Moment, *, begun_s: float) -> list[str]:
    """A moment as lines of at most 80 columns."""
    minutes, seconds = divmod(max(0, round(moment.at_s - begun_s)), 60)
    step = "" if moment.step is None else str(moment.step)
    first = f"{f'{minutes}:{seconds:02d}':>7}  {step:>6}   "
    return textwrap.wrap(" ".join(moment.text.split()), WIDTH, initial_indent=first, subsequent_indent=" " * _INDENT)
