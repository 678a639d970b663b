"""Environment files as `infra/make-secrets` writes them."""

from __future__ import annotations

from pathlib import Path


def values_of(file: Path) -> dict[str, str]:
    """Name to value of every line that is no comment."""
    lines = (line for line in file.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#"))
    return dict(line.split("=", 1) for line in lines)
