"""The version of the code that runs: the package's version and a hash of its sources.

A checkout is edited without a new release, so a version number alone says nothing; the hash changes with every file of the packages
that decide what a flow run does.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("dflash", "flows", "prefect_dflash", "tasks")
ROOT = Path(__file__).parents[1]


@cache
def code_version() -> str:
    """Such as `0.1.0+3f9a1c20b7d4`; the same for the same sources on every machine."""
    digest = hashlib.sha256()
    for file in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(ROOT).as_posix()}\0{len(content)}\0".encode() + content)
    return f"{version('dflash-pipeline')}+{digest.hexdigest()[:12]}"
