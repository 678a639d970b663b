"""Numbers as other people write them: a number, nothing, or the word that it was not a number.

Invariant: a bare NaN or Infinity is never nothing, and an empty cell is never NaN. The text "nan" can be either: golden
files write it for a value that was not logged, text tables for one that was not finite; the caller knows which.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Absent = Literal["absent"]
ABSENT: Final[Absent] = "absent"
NonFiniteValue = Literal["nonfinite"]
NONFINITE: Final[NonFiniteValue] = "nonfinite"
Spelt = Literal["spelt"]
SPELT_NAN: Final[Spelt] = "spelt"
"""The text "nan" or "inf"."""

Value = float | Absent | NonFiniteValue | Spelt

Row = Mapping[str, Any]

LARGEST_STEP = 2**53
"""Beyond it a step is no longer a whole number in JSON, and certainly none of a training."""

_SPELT = frozenset({"nan", "+nan", "-nan", "inf", "+inf", "-inf", "infinity", "+infinity", "-infinity"})
_DEEPEST = 4
_LONGEST_TEXT = 64


@dataclass(slots=True)
class Rows:
    """Rows as they are read, and what was met on the way.

    Attributes:
        format: in words, once the first row has come.
        unreadable: lines that are no record.
        spelt_is_absent: the text "nan" stands for a value that was not logged.
    """

    format: str
    unreadable: int = 0
    spelt_is_absent: bool = False
    notes: list[str] = field(default_factory=list)


def value_of(raw: Any) -> Value:
    """What a field holds."""
    if isinstance(raw, bool) or raw is None:
        return ABSENT
    if isinstance(raw, int | float):
        try:
            number = float(raw)
        except OverflowError:
            return NONFINITE
        return number if math.isfinite(number) else NONFINITE
    if isinstance(raw, str) and 0 < len(raw) <= _LONGEST_TEXT:
        text = raw.strip()
        if text.lower() in _SPELT:
            return SPELT_NAN
        try:
            number = float(text)
        except ValueError:
            return ABSENT
        return number if math.isfinite(number) else NONFINITE
    return ABSENT


def step_of(raw: Any) -> int | None:
    """A step that may be negative; None for what is none."""
    value = value_of(raw)
    if not isinstance(value, float) or abs(value) > LARGEST_STEP or value != math.floor(value):
        return None
    return int(value)


def flattened(row: Mapping[str, Any]) -> dict[str, Any]:
    """Nested objects as one level, names joined by dots; lists are left out."""
    flat: dict[str, Any] = {}
    pending: list[tuple[str, Mapping[str, Any], int]] = [("", row, 0)]
    while pending:
        prefix, level, depth = pending.pop()
        for name, value in level.items():
            if isinstance(value, Mapping):
                if depth < _DEEPEST:
                    pending.append((f"{prefix}{name}.", value, depth + 1))
            elif not isinstance(value, list):
                flat[f"{prefix}{name}"] = value
    return flat
