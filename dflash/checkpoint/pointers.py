"""`latest`, `latest_clean` and `best`: one-line text files that name a checkpoint, replaced atomically.

They are for people and other tools; recovery never depends on them, it lists and verifies the folders. `best` is the one whose
acceptance length is the highest by its probes, and retention spares what it names.
"""

from __future__ import annotations

from pathlib import Path

from dflash.checkpoint.layout import folder_name, step_of
from dflash.storage import atomic_write_text


def point_to(directory: Path, pointer: str, step: int) -> None:
    """Let `pointer` (`latest`, `latest_clean` or `best`) name the checkpoint of `step`."""
    atomic_write_text(directory / pointer, folder_name(step) + "\n")


def read_pointer(directory: Path, pointer: str) -> int | None:
    """Step that a pointer names; None if it does not exist or names no checkpoint."""
    file = directory / pointer
    if not file.is_file():
        return None
    return step_of(file.read_text(encoding="utf-8").strip())


def remove_pointer(directory: Path, pointer: str) -> None:
    """Let `pointer` name nothing any more."""
    (directory / pointer).unlink(missing_ok=True)
