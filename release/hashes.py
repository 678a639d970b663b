"""requirements.lock: every pinned package with the SHA-256 of its wheel, for installations that take nothing but what was tested.

    python -m pip install --require-hashes --no-deps --requirement requirements.lock
    python -m pip install --no-deps .

Invariant: names and versions are those of constraints.txt, one hash each; a test compares them. Hard decision: the hashes are of
the wheels for Linux on x86_64 and Python 3.11, which is what was tested. torch is left out: its wheel differs from machine to
machine (CPU, CUDA version) under one version number; install it first, from the index of your choice. Written from what pip itself
reports of the index in use (`make lock`); nothing is installed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"
CONSTRAINTS = ROOT / "constraints.txt"
LEFT_OUT = frozenset({"torch"})
HEAD = "# Wheels tested together: Linux x86_64, Python 3.11; torch apart. Written by `make lock`; see release/hashes.py."


def main() -> int:
    """Ask pip for the wheels of all pins and write their hashes."""
    pins = pinned(CONSTRAINTS.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        wanted, report = Path(folder) / "pins.txt", Path(folder) / "report.json"
        wanted.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
        command += ["--disable-pip-version-check", "--report", str(report), "--requirement", str(wanted)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        found = json.loads(report.read_text(encoding="utf-8"))
    LOCK.write_text(lock_text(found, pins), encoding="utf-8")
    return 0


def pinned(constraints: str) -> dict[str, str]:
    """Name to version of every pin but those left out."""
    pairs = (line.split("==") for line in constraints.splitlines() if line and not line.startswith("#"))
    return {normal(name): version for name, version in pairs if normal(name) not in LEFT_OUT}


def lock_text(report: dict[str, Any], pins: dict[str, str]) -> str:
    """The lock out of pip's report.

    Raises:
        SystemExit: the index gave another version, no hash, or something that is no wheel.
    """
    hashes: dict[str, str] = {}
    for item in report["install"]:
        name, version = normal(item["metadata"]["name"]), item["metadata"]["version"]
        archive = item["download_info"].get("archive_info", {})
        sha256 = archive.get("hashes", {}).get("sha256")
        if pins.get(name) != version or sha256 is None or not item["download_info"]["url"].endswith(".whl"):
            raise SystemExit(f"{name} {version}: the index in use gives no wheel with a SHA-256 of version {pins.get(name)}")
        hashes[name] = sha256
    missing = sorted(set(pins) - set(hashes))
    if missing:
        raise SystemExit(f"the index in use does not give {', '.join(missing)}")
    lines = [f"{name}=={pins[name]} --hash=sha256:{hashes[name]}" for name in sorted(pins)]
    return "\n".join([HEAD, *lines, ""])


def normal(name: str) -> str:
    """A distribution's name as packaging tools compare it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


if __name__ == "__main__":
    sys.exit(main())
