"""`latest` and `latest_clean`: one-line text files that name a checkpoint, replaced atomically.

They are for people and other tools; recovery never depends on them, it lists and verifies the folders.
"""

from __future__ import annotations

from pathlib import Path

from dflash.checkpoint.layout import folder_name, step_of
from dflash.storage import atomic_write_text


def point_to(directory: Path, pointer: str, step: int) -> None:
    """Let `pointer` (`latest` or `latest_clean`) name the checkpoint of `step`."""
    atomic_write_text(directory / pointer, folder_name(step) + "\n")


def read_pointer(directory: Path, pointer: str) -> int | None:
    """Step that a pointer names; None if it does not exist or names no checkpoint."""
    file = directory / pointer
    if not file.is_file():
        return None
    return step_of(file.read_text(encoding="utf-8").strip())
