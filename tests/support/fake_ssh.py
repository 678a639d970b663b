"""An `ssh` that runs the remote command on this machine, as the remote shell would."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_SCRIPT = """#!/bin/sh
# Options with a value are skipped up to `--`; then come the host and the one word that is the command.
printf '%s\\n' "$*" >> "$FAKE_SSH_LOG"
while [ "$1" != "--" ]; do shift; done
host="$2"
[ "$host" = "down" ] && { echo "ssh: connect to host down port 22: No route to host" >&2; exit 255; }
exec sh -c "$3"
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the fake first on PATH; returns the file that lists how it was called."""
    folder.mkdir(parents=True)
    program = folder / "ssh"
    program.write_text(_SCRIPT)
    program.chmod(0o755)
    wrapper = folder / "pct"
    wrapper.write_text('#!/bin/sh\n[ "$1 $2 $3" = "exec 200 --" ] || exit 64\nshift 3\nexec "$@"\n')
    wrapper.chmod(0o755)
    calls = folder / "calls"
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SSH_LOG", str(calls))
    return calls
