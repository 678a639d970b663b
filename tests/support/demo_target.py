"""The folder of the target that ships with the package."""

from __future__ import annotations

from pathlib import Path

from dflash.config import TargetConfig

DEMO_TARGET = Path(TargetConfig(path="demo", mask_token_id=3).location)
