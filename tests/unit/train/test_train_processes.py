"""Identities, dying with the parent, and ending what was left over; real processes."""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflash.records import RunPaths
from dflash.train import processes as room
from dflash.train.processes import (
    ProcessIdentity,
    end_child,
    end_recorded,
    identify,
    recorded_processes,
    register_process,
)

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), child.pid, flush=True)
sys.stdin.readline()
"""
CHILD = """
import os, time
from dflash.train.processes import die_with_parent
print("up" if die_with_parent(os.getppid()) else "orphan", flush=True)
time.sleep(600)
"""
REGISTERING = """
import os, sys, time
from pathlib import Path
from dflash.records import RunPaths
from dflash.train.processes import identify, register_process
register_process(RunPaths(Path(sys.argv[1])), identify(os.getpid(), role="trainer"))
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


@pytest.fixture
def spawn() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *arguments]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def identity_of(process: subprocess.Popen[str], *, role: str = "trainer") -> ProcessIdentity:
    identity = identify(process.pid, role=role)
    assert identity is not None
    return identity


def test_an_identity_is_stable_and_ends_with_the_process(spawn: Callable[[str], subprocess.Popen[str]]) -> None:
    process = spawn(SLEEPER)
    first_line(process)
    assert identity_of(process) == identity_of(process)
    assert identity_of(process) != identify(os.getpid(), role="trainer")
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert identify(process.pid, role="trainer") is None, "a zombie is no running process"


def test_leftovers_are_asked_and_then_killed(paths: RunPaths, spawn: Callable[[str], subprocess.Popen[str]]) -> None:
    gentle, stubborn = spawn(SLEEPER), spawn(STUBBORN)
    for process in (gentle, stubborn):
        first_line(process)
        register_process(paths, identity_of(process))
    assert {process.pid for process in recorded_processes(paths)} == {gentle.pid, stubborn.pid}
    assert end_recorded(paths, grace_s=0.5) == 2
    assert gentle.wait() == -signal.SIGTERM
    assert stubborn.wait() == -signal.SIGKILL
    assert recorded_processes(paths) == []
    assert end_recorded(paths, grace_s=0.5) == 0


def test_who_has_no_time_left_is_killed_and_waited_for_all_the_same(
    paths: RunPaths, spawn: Callable[[str], subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    stock = room._wait_gone
    monkeypatch.setattr(
        room, "_wait_gone", lambda process, timeout_s: waits.append(timeout_s) or stock(process, timeout_s=timeout_s)
    )
    for process in (spawn(STUBBORN), spawn(STUBBORN)):
        first_line(process)
        register_process(paths, identity_of(process))
    assert end_recorded(paths, grace_s=0.0) == 2
    assert recorded_processes(paths) == []
    assert waits == [0.0, room.KILLED_WITHIN_S] * 2


def test_a_reused_pid_is_never_touched(paths: RunPaths, spawn: Callable[[str], subprocess.Popen[str]]) -> None:
    bystander = spawn(SLEEPER)
    first_line(bystander)
    identity = identity_of(bystander)
    for other in (
        dataclasses.replace(identity, start_ticks=identity.start_ticks - 1),
        dataclasses.replace(identity, boot_id="another boot"),
    ):
        register_process(paths, other)
        assert end_recorded(paths, grace_s=0.1) == 0
    assert bystander.poll() is None


def test_processes_registering_at_once_are_all_recorded(paths: RunPaths, spawn: Callable[..., subprocess.Popen[str]]) -> None:
    processes = [spawn(REGISTERING, str(paths.root)) for _ in range(4)]
    assert [first_line(process) for process in processes] == ["up"] * 4
    assert {process.pid for process in recorded_processes(paths)} == {process.pid for process in processes}


def test_a_process_dies_with_its_parent(spawn: Callable[..., subprocess.Popen[str]]) -> None:
    parent = spawn(PARENT, CHILD)
    state, pid = first_line(parent).split()
    assert state == "up"
    descriptor = os.pidfd_open(int(pid))
    try:
        parent.kill()
        readable, _, _ = select.select([descriptor], [], [], 30)
        assert readable, "the child outlives its killed parent"
    finally:
        os.close(descriptor)


def test_a_process_whose_parent_is_gone_already_is_told(spawn: Callable[[str], subprocess.Popen[str]]) -> None:
    process = spawn(
        "import os; from dflash.train.processes import die_with_parent; print(die_with_parent(os.getppid() + 1), flush=True)"
    )
    assert first_line(process) == "False"


def test_a_process_that_ended_is_not_recorded_any_more(paths: RunPaths, spawn: Callable[[str], subprocess.Popen[str]]) -> None:
    process = spawn("print('up', flush=True)")
    first_line(process)
    identity = ProcessIdentity(role="trainer", pid=process.pid, start_ticks=0, boot_id="")
    register_process(paths, identity)
    process.wait()
    assert recorded_processes(paths) == []
    assert end_recorded(paths, grace_s=60) == 0


@pytest.mark.parametrize(("code", "ended_by"), [(SLEEPER, signal.SIGTERM), (STUBBORN, signal.SIGKILL)])
def test_a_child_is_ended_gently_and_then_for_good(
    spawn: Callable[[str], subprocess.Popen[str]], code: str, ended_by: signal.Signals
) -> None:
    child = spawn(code)
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    end_child(child, grace_s=0.2 if ended_by is signal.SIGKILL else 60.0)
    assert child.returncode == -ended_by
    end_child(child, grace_s=60.0)
    assert child.returncode == -ended_by, "one that is gone is left alone"
