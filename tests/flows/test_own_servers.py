"""Servers of a drill or a test end with the process that wanted them, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

STARTS = """
import pathlib, subprocess, sys
from tasks.own_servers import servers_end_with_us, servers_environment
root = pathlib.Path(sys.argv[1])
environment = servers_environment(root, runs=root)
with servers_end_with_us(environment):
    state = root / "local"
    state.mkdir()
    server = subprocess.Popen(["sleep", "600"], start_new_session=True)
    started = pathlib.Path(f"/proc/{server.pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    (state / "mlflow.pid").write_text(f"{server.pid} {started}")
    print(server.pid, flush=True)
    sys.stdin.read()
"""


def test_servers_of_a_process_that_is_killed_are_stopped(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTS, str(tmp_path)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    server = psutil.Process(int(owner.stdout.readline()))
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    assert psutil.wait_procs([server], timeout=60)[0] == [server]
    owner.stdout.close()
