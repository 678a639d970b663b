"""The demo's target: a tiny Qwen3 chat model shipped as package data, and the code that builds it from nothing."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from dflash.errors import TargetError

__all__ = ["demo_target_path"]


def demo_target_path() -> Path:
    """Return the Hugging Face folder of the shipped demo target.

    Raises TargetError if the package was installed without its data, or is imported from an archive.
    """
    folder = files("dflash.demo") / "target"
    if not isinstance(folder, Path) or not (folder / "config.json").is_file():
        raise TargetError(
            f"the demo target is not in this installation: {folder} has no config.json",
            remedy="install the package unpacked, or build it with `python -m dflash.demo.build_target --out DIR`",
        )
    return folder
