"""Text that is safe to print: a name from a config or a path can never move the cursor or forge a line."""

from __future__ import annotations

import unicodedata


def clean_text(text: str) -> str:
    """Replace control, format, surrogate and line-separating characters by `?`."""
    return "".join("?" if unicodedata.category(char) in {"Cc", "Cf", "Cs", "Zl", "Zp"} else char for char in text)


def bar(frac: float, *, width: int) -> str:
    """A bar of `width` characters that is filled in proportion to `frac` (0..1)."""
    filled = round(min(max(frac, 0.0), 1.0) * width)
    return "#" * filled + "." * (width - filled)
