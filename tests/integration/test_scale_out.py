"""Supervised runs of several ranks with real torchrun, on one machine and on two "machines" in network namespaces of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from dflash.records import RunPaths
from dflash.train.processes import recorded_processes
from dflash.train.supervisor import TrainOutcome, supervise
from tests.support.same_training import assert_same_training
from tests.support.tiny_run import TinyRun, build_tiny_run
from tests.support.trainer_process import end_of, log_lines, start_ranks

COMMON = ("checkpoint.interval_steps=10", "train.accumulation_steps=1", "cluster.replicas=2", "train.restart_wait_s=0.1")
LONG = (*COMMON, "train.epochs=36")
ORPHAN_LIMIT_S = 10.0

SUPERVISOR = """
import sys
from pathlib import Path
from dflash.config import load_config
from dflash.records import RunPaths
from dflash.train.supervisor import supervise
paths = RunPaths(Path(sys.argv[1]))
supervise(load_config(paths.config), paths, on_tick=lambda: None, critical_spans=lambda: ())
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scale")


@pytest.fixture(scope="module")
def reference(root: Path) -> TinyRun:
    run = build_tiny_run(root, overrides=LONG)
    assert [end_of(process) for process in start_ranks(run)] == [0, 0]
    return run


def watch(run: TinyRun, on_tick: Callable[[], None]) -> TrainOutcome:
    return supervise(run.config, run.paths, on_tick=on_tick, critical_spans=lambda: ())


def last_step(paths: RunPaths) -> int:
    return max((line["step"] for line in log_lines(paths) if line["kind"] == "step"), default=-1)


def pids_of(paths: RunPaths) -> dict[str, int]:
    return {process.role: process.pid for process in recorded_processes(paths)}


def test_killing_a_rank_and_then_torchrun_restarts_all_ranks_and_the_end_is_the_same(root: Path, reference: TinyRun) -> None:
    run = build_tiny_run(root, overrides=LONG)
    victims = [("trainer-1", 15), ("torchrun", 40)]
    launchers: set[int] = set()
    listening: list[str] = []

    def on_tick() -> None:
        pids = pids_of(run.paths)
        for pid in pids.values():
            try:
                connections = psutil.Process(pid).net_connections()
            except psutil.NoSuchProcess:
                continue
            listening.extend(item.laddr.ip for item in connections if item.status == psutil.CONN_LISTEN)
        complete = {"torchrun", "trainer", "trainer-1"} <= set(pids)
        # The torchrun of a killed rank still takes a while to end: each victim belongs to a launch of its own.
        if victims and complete and last_step(run.paths) >= victims[0][1] and pids["torchrun"] not in launchers:
            launchers.add(pids["torchrun"])
            os.kill(pids[victims.pop(0)[0]], signal.SIGKILL)

    outcome = watch(run, on_tick)
    assert outcome.restarts == 2 and not victims
    assert_same_training(run, reference)
    assert set(listening) <= {"127.0.0.1"}, "ranks of one machine talk through the loopback alone"
    assert recorded_processes(run.paths) == []
    assert not list(run.paths.control_dir.glob("rendezvous*"))


IN_FULL = pytest.mark.full


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param("trainer", marks=IN_FULL),
        pytest.param("trainer-1", marks=IN_FULL),
        pytest.param("torchrun", marks=IN_FULL),
        "supervisor",
    ],
)
def test_no_orphan_remains_ten_seconds_after_any_process_was_killed(root: Path, victim: str) -> None:
    run = build_tiny_run(root, overrides=[*LONG, "train.epochs=2000", "train.max_restarts=0"])
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(run.paths.root)], stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: last_step(run.paths) >= 2 and set(pids_of(run.paths)) == {"torchrun", "trainer", "trainer-1"}, 120.0)
        processes = [psutil.Process(pid) for pid in pids_of(run.paths).values()]
        os.kill(supervisor.pid if victim == "supervisor" else pids_of(run.paths)[victim], signal.SIGKILL)
        _, alive = psutil.wait_procs(processes, timeout=ORPHAN_LIMIT_S)
        assert not alive, f"still running {ORPHAN_LIMIT_S} s after the {victim} was killed: {alive}"
    finally:
        supervisor.kill()
        supervisor.wait()


def wait_for(condition: Callable[[], bool], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to this"
        time.sleep(0.02)


def run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def two_machines() -> Iterator[tuple[str, str]]:
    """Names of two network namespaces that share nothing but a virtual cable (10.77.0.1 and 10.77.0.2)."""
    tag = f"df{os.getpid() % 100_000}"
    names = (f"{tag}a", f"{tag}b")
    try:
        for name in names:
            run_ip("netns", "add", name)
        run_ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for number, name in enumerate(names, start=1):
            run_ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", name)
            run_ip("-n", name, "link", "set", name, "up")
            run_ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def namespaces_work() -> bool:
    try:
        with two_machines():
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


@pytest.mark.full
@pytest.mark.skipif(not namespaces_work(), reason="network namespaces (ip netns) are not allowed on this machine")
def test_two_machines_train_as_one_and_survive_the_loss_of_a_rank(root: Path, reference: TinyRun) -> None:
    with two_machines() as (first, second):
        places = ["cluster.nodes=2", "cluster.rendezvous=10.77.0.1:29477", "cluster.collective_timeout_s=60"]
        run = build_tiny_run(root, overrides=[*LONG, *places])
        followers = subprocess.Popen(
            ["ip", "netns", "exec", second, sys.executable, "-m", "dflash", "join", str(run.paths.root), "--node", "1"],
            env=os.environ | {"GLOO_SOCKET_IFNAME": second},
        )
        supervisor = subprocess.Popen(
            ["ip", "netns", "exec", first, sys.executable, "-c", SUPERVISOR, str(run.paths.root)],
            env=os.environ | {"GLOO_SOCKET_IFNAME": first},
        )
        try:
            wait_for(lambda: last_step(run.paths) >= 15 and "trainer-1" in pids_of(run.paths), 180.0)
            os.kill(pids_of(run.paths)["trainer-1"], signal.SIGKILL)
            assert supervisor.wait(timeout=180.0) == 0
            assert followers.wait(timeout=60.0) == 0
        finally:
            for process in (followers, supervisor):
                process.kill()
                process.wait()
    assert {line["segment"] for line in log_lines(run.paths)} == {0, 1}
    assert_same_training(run, reference)
    assert recorded_processes(run.paths) == []
