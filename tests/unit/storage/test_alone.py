"""One process at a time, and no lock outlives its holder."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflash.errors import StorageError
from dflash.storage import alone

HOLDER = """
import sys
from pathlib import Path
from dflash.storage import alone
with alone(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def is_free(lock: Path) -> bool:
    with lock.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_it_is_held_by_one_process_until_it_is_killed(tmp_path: Path) -> None:
    lock = tmp_path / "new" / "folder" / "lock"
    command = [sys.executable, "-c", HOLDER, os.fspath(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert not is_free(lock)
        holder.send_signal(signal.SIGKILL)
        with alone(lock):
            assert not is_free(lock)
    assert is_free(lock)


def test_a_block_that_fails_lets_go(tmp_path: Path) -> None:
    def fail() -> None:
        with alone(tmp_path / "lock"):
            raise ValueError("in the block")

    with pytest.raises(ValueError, match="in the block"):
        fail()
    assert is_free(tmp_path / "lock")


def test_a_place_that_takes_no_lock_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="lock cannot be locked"), alone(tmp_path / "file" / "lock"):
        raise AssertionError
