"""The probing process with a real supervisor: it measures, dies with whoever started it, and is gone on with by the next one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from dflash.checkpoint import BEST, outcomes, read_pointer, read_probes
from dflash.records import RunPaths
from dflash.stages.probe_watch import probe_watch
from tests.support.probe_run import build_probe_run, save_drafter

WAIT_S = 240.0
NICENESS = 3
"""Of a test that may not starve on a busy machine."""

SUPERVISOR = """
import sys, time
from dflash.stages.probe_watch import probe_watch
from dflash.stages.run import reopen_run
with probe_watch(reopen_run(sys.argv[1])) as watch:
    while True:
        watch.tick()
        time.sleep(0.02)
"""


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not happen"
        time.sleep(0.01)


def prober_of(supervisor: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(supervisor.pid).children()
    except psutil.NoSuchProcess:
        return []


def logged(paths: RunPaths) -> list[int]:
    if not paths.log.exists():
        return []
    return [json.loads(line)["step"] for line in paths.log.read_text().splitlines()]


def measured(paths: RunPaths) -> list[int]:
    return sorted(step for (step, _), record in outcomes(read_probes(paths.probes)).items() if record.figures is not None)


def test_a_killed_supervisor_leaves_no_orphan_and_the_next_one_goes_on(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))  # servers of other tests
    run = build_probe_run(tmp_path, overrides=(f"probe.niceness={NICENESS}",))
    save_drafter(run, 20)
    with subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(run.paths.root)]) as supervisor:
        try:
            wait_for(lambda: read_pointer(run.paths.checkpoints_dir, BEST) == 20, "the first probe")
            (prober,) = prober_of(supervisor)
            assert prober.nice() == max(NICENESS, psutil.Process().nice())
            assert not prober.net_connections()
        finally:
            supervisor.send_signal(signal.SIGKILL)
    prober.wait(timeout=60)
    assert not prober.is_running()
    assert logged(run.paths) == [20]

    save_drafter(run, 40)
    with probe_watch(run) as watch:

        def ticked() -> bool:
            watch.tick()
            return 40 in logged(run.paths)

        wait_for(ticked, "the event of the second probe")
    assert measured(run.paths) == [20, 40]
    assert logged(run.paths) == [20, 40], "what the dead supervisor had taken in is not logged again"
    assert set(psutil.Process().children(recursive=True)) <= before, "the process ends with the watch"
