"""Sealed files of a data set or a plan, changed on purpose by somebody who also mends the seal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash.records import sealed, unsealed


def values_of(file: Path) -> dict[str, Any]:
    """What a sealed file says."""
    return unsealed(file.read_bytes(), origin=str(file))


def rewrite(file: Path, **changed: Any) -> None:
    """Give a sealed file other values, and the seal that fits them."""
    file.write_text(sealed(values_of(file) | changed))
