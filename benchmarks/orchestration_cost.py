"""What watching costs: the CPU time of a health check of an idle run, and of a supervisor whose trainer does nothing.

CPU time (user and system) and not wall time, so a busy machine changes little. A check by a worker is a whole process: interpreter,
imports, flow engine, the talk with a real Prefect server. A served one is the same flow in a process that lives on
(`python -m flows.serve_health`). The supervisor polls for a trainer that is stopped (SIGSTOP), so nothing but polling is measured.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from uuid import UUID

from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.settings import PREFECT_API_URL, temporary_settings

from benchmarks.report import ROOT, benchmark_parser, publish
from dflash.records import RunPaths
from dflash.train.runs import hold_run
from flows.health import health_check
from tasks.server import temporary_server
from tests.support.log_simulator import simulate_run, write_log
from tests.support.tiny_run import build_tiny_run

POLLING = "--polling"
"""Option that makes this script the supervisor whose CPU time is measured."""


class _EnoughError(Exception):
    """The time to measure is over."""


def main() -> None:
    """Measure and publish."""
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument(POLLING, type=float, metavar="SECONDS", help="measure a supervisor in this process; print its share")
    arguments = parser.parse_args()
    if arguments.polling is not None:
        polling_share(arguments.polling)
        return
    logging.disable(logging.WARNING)
    repeats = 1 if arguments.quick else 7
    figures: dict[str, object] = {
        "prefect_import_cpu_s": _median([python_cpu_s("import prefect") for _ in range(repeats)]),
        "check_import_cpu_s": _median([python_cpu_s("import flows.health") for _ in range(repeats)]),
    }
    with tempfile.TemporaryDirectory() as folder, temporary_server() as api_url:
        config, run = idle_run(Path(folder))
        with temporary_settings({PREFECT_API_URL: api_url}), hold_run(run), get_client(sync_client=True) as client:
            health_check(str(config))  # reads the whole log; every later check is one of an idle run
            alone = [worker_check_cpu_s(client, config, api_url) for _ in range(repeats)]
            served = [served_check_cpu_s(config) for _ in range(4 * repeats)][1:]
    shares = [polling_in_a_process(8.0 if arguments.quick else 60.0) for _ in range(1 if arguments.quick else 3)]
    figures |= {
        "check_by_worker_cpu_s": _median(alone),
        "check_by_worker_worst_cpu_s": max(alone),
        "check_served_cpu_s": _median(served),
        "check_served_worst_cpu_s": max(served),
        "supervisor_polling_cpu_frac": _median(shares),
    }
    publish("orchestration_cost", figures, arguments)


def idle_run(folder: Path) -> tuple[Path, RunPaths]:
    """A run with a thousand records, the newest of this moment; returns its configuration and its folder."""
    run = build_tiny_run(folder, overrides=["train.schedule=constant", "checkpoint.interval_steps=200"])
    records = simulate_run(seed=3, steps=1000, lr=lambda _step: 0.01)[:-1]
    shift_s = time.time() - records[-1].wall_time_s
    write_log(run.paths.log, [replace(record, wall_time_s=record.wall_time_s + shift_s) for record in records])
    config = folder / "idle.yaml"
    config.write_bytes(run.paths.config.read_bytes())
    return config, run.paths


def worker_check_cpu_s(client: SyncPrefectClient, config: Path, api_url: str) -> float:
    """CPU seconds of the process that a worker starts for one check."""
    flow = client.create_flow_from_name(health_check.name)
    deployment: UUID = client.create_deployment(
        flow, name="measured", path=str(ROOT), entrypoint="flows.health:health_check", parameters={"config": str(config)}
    )
    run = client.create_flow_run_from_deployment(deployment)
    cpu_s = _process_cpu_s(["-m", "prefect.engine"], PREFECT_API_URL=api_url, PREFECT__FLOW_RUN_ID=str(run.id))
    state = client.read_flow_run(run.id).state
    if state is None or not state.is_completed():
        raise SystemExit(f"the measured check did not complete: {state}")
    return cpu_s


def served_check_cpu_s(config: Path) -> float:
    """CPU seconds of one more check in this process, with the threads that talk to the server."""
    before_s = time.process_time()
    health_check(str(config))
    return time.process_time() - before_s


def python_cpu_s(code: str) -> float:
    """CPU seconds of an interpreter that runs `code`."""
    return _process_cpu_s(["-c", code])


def polling_in_a_process(seconds: float) -> float:
    """Share of one core that a supervisor takes while its trainer stands still."""
    command = [sys.executable, "-m", "benchmarks.orchestration_cost", POLLING, str(seconds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def polling_share(seconds: float) -> None:
    """Supervise a tiny run, stop its trainer, let `seconds` pass, and print the share of CPU time."""
    from dflash.train.processes import recorded_processes
    from dflash.train.supervisor import supervise

    with tempfile.TemporaryDirectory() as folder:
        run = build_tiny_run(Path(folder), overrides=["train.epochs=400", "checkpoint.interval_steps=10", "train.heartbeat_s=2"])
        stopped: dict[str, float] = {}

        def on_tick() -> None:
            now_s = time.monotonic()
            if not stopped:
                if len(list(run.paths.checkpoints_dir.glob("step-*0"))) >= 5:
                    for process in recorded_processes(run.paths):
                        os.kill(process.pid, signal.SIGSTOP)
                    stopped["from_s"] = now_s + 3
            elif "cpu_s" not in stopped and now_s >= stopped["from_s"]:
                stopped.update(cpu_s=time.process_time(), from_s=now_s)
            elif "cpu_s" in stopped and now_s >= stopped["from_s"] + seconds:
                print(json.dumps((time.process_time() - stopped["cpu_s"]) / (now_s - stopped["from_s"])))
                for process in recorded_processes(run.paths):
                    os.kill(process.pid, signal.SIGCONT)
                raise _EnoughError

        try:
            supervise(run.config, run.paths, on_tick=on_tick, critical_spans=lambda: ())
        except _EnoughError:
            return


def _process_cpu_s(arguments: list[str], **settings: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, *arguments]
    quiet = subprocess.DEVNULL
    subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, stdout=quiet, stderr=quiet, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _median(values: list[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    main()
