"""A worker of the health pool that carries the checks out in its own process: `python -m flows.serve_health`.

A worker of Prefect starts a process a flow run, and most of a check's CPU time is that process's imports. This one imports once. To
the server it is a worker like any other (heartbeats, limit, schedules). What it gives up is the wall between checks: one that hangs
holds the next ones until its own time limit ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import warnings
from functools import partial

import anyio
from anyio.abc import TaskStatus
from prefect.client.schemas.objects import FlowRun
from prefect.flow_engine import run_flow
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker, ProcessWorkerResult

from flows.health import health_check
from tasks.local import require_server, run_program

POOL = "dflash-health"

# It is a process worker, by name and on purpose: the pool is one for process workers.
warnings.filterwarnings("ignore", message="Type 'InProcessWorker'", category=UserWarning)


class InProcessWorker(ProcessWorker):
    """Carries out health checks in this process, and any other flow as its base class does."""

    async def run(
        self, flow_run: FlowRun, configuration: ProcessJobConfiguration, task_status: TaskStatus[int] | None = None
    ) -> ProcessWorkerResult:
        """Carry one flow run out to its end."""
        flow = await self.client.read_flow(flow_run.flow_id)
        if flow.name != health_check.name:
            return await super().run(flow_run, configuration, task_status=task_status)
        if task_status is not None:
            task_status.started(os.getpid())
        here = partial(run_flow, health_check, flow_run=flow_run, parameters=flow_run.parameters, return_type="state")
        await anyio.to_thread.run_sync(here)
        return ProcessWorkerResult(status_code=0, identifier=f"{socket.gethostname()}:{os.getpid()}")


def main() -> int:
    """Command line; returns the exit code when the worker is told to end."""
    parser = argparse.ArgumentParser(description="Serve the health checks of a work pool from one process.")
    parser.add_argument("--pool", default=POOL, help=f"work pool, {POOL} if absent")
    parser.add_argument("--name", default=f"served-{socket.gethostname()}", help="name of this worker")
    arguments = parser.parse_args()

    def body() -> None:
        asyncio.run(InProcessWorker(work_pool_name=arguments.pool, name=arguments.name, limit=1).start())

    return run_program(body, check=require_server)


if __name__ == "__main__":
    sys.exit(main())
