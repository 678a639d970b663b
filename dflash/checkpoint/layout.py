"""Names inside `checkpoints/`: which folders are checkpoints, and what each holds.

Invariant: `step-N` exists under that name only when it is complete; unfinished and condemned folders carry a suffix
and are never read.
"""

from __future__ import annotations

import re
from pathlib import Path

DRAFTER_FILE = "drafter.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "trainer.json"
MANIFEST_FILE = "manifest.json"
WRITING_SUFFIX = ".tmp"
REPLACED_SUFFIX = ".old"
DELETED_SUFFIX = ".deleted"

ASIDE_FOLDER = "aside"
"""Folder of abandoned checkpoints, kept until the run has got past what they were abandoned for."""

LATEST = "latest"
LATEST_CLEAN = "latest_clean"
BEST = "best"

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_STEP_NAME = re.compile(r"step-(0|[1-9]\d*)")


def is_file_name(name: str) -> bool:
    """Whether a manifest may name this file of its folder: a plain name, so that nothing outside is ever read, sent or written."""
    return _FILE_NAME.fullmatch(name) is not None and name != MANIFEST_FILE


def folder_name(step: int) -> str:
    """Folder of the state after `step` updates."""
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """Step of a complete checkpoint's folder name, None for any other name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match.group(1)) if match else None


def list_checkpoints(directory: Path) -> list[int]:
    """Steps of the complete checkpoints in `directory`, ascending; contents are not verified."""
    if not directory.is_dir():
        return []
    steps = (step_of(path.name) for path in directory.iterdir() if (path / MANIFEST_FILE).is_file())
    return sorted(step for step in steps if step is not None)


def leftovers(directory: Path) -> list[Path]:
    """Folders that a killed writer or a killed deletion left behind."""
    if not directory.is_dir():
        return []
    suffixes = (WRITING_SUFFIX, REPLACED_SUFFIX, DELETED_SUFFIX)
    return sorted(path for path in directory.iterdir() if path.is_dir() and path.name.endswith(suffixes))
