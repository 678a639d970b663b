"""`tests/run`: temporary files lie in memory where there is plenty of it, and go with the command however it ends."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "run"
GIB_KB = 2**20
MEMORY = Path("/dev/shm")  # noqa: S108 - what the script itself uses


def run(folder: Path, script: str, *, free_kb: int, room_kb: int) -> tuple[int, str]:
    """Exit code and output of a shell script under `tests/run`; the output ends when what waits for the end has ended, too."""
    for name, answer in {"awk": free_kb, "df": room_kb}.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\necho {answer}\n", encoding="utf-8")
        program.chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "TMPDIR": str(folder)}
    # What runs the tests may ignore SIGINT, as a shell's background jobs do, and would hand that down.
    command = ["env", "--default-signal=INT", RUN, "sh", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout.strip()


@pytest.mark.skipif(not MEMORY.is_dir(), reason="there is no /dev/shm here")
@pytest.mark.parametrize("end", ["exit 0", "exit 7", "kill -INT $$", "kill -TERM $$", "kill -KILL $$"])
def test_the_folder_in_memory_is_gone_however_the_command_ends(tmp_path: Path, end: str) -> None:
    code, scratch = run(tmp_path, f'mkdir -p "$TMPDIR/a/b" && echo "$TMPDIR" && {end}', free_kb=16 * GIB_KB, room_kb=8 * GIB_KB)
    assert Path(scratch).parent == MEMORY
    assert not Path(scratch).exists()
    how = end.split()
    assert code == (int(how[1]) if how[0] == "exit" else -signal.Signals[f"SIG{how[1][1:]}"])


@pytest.mark.parametrize(("free_kb", "room_kb"), [(4 * GIB_KB, 8 * GIB_KB), (16 * GIB_KB, 64 * 1024)])
def test_without_much_memory_the_usual_folder_stays(tmp_path: Path, free_kb: int, room_kb: int) -> None:
    assert run(tmp_path, 'echo "$TMPDIR"; exit 3', free_kb=free_kb, room_kb=room_kb) == (3, str(tmp_path))
