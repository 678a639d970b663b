"""The worker that carries health checks out in its own process, on a real server."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from uuid import UUID

import pytest
from prefect import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun

from flows.health import health_check
from flows.serve_health import InProcessWorker
from tests.flows.fake_stages import FakeStages

POOL = "served"
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("prefect_server")


async def served(config: str) -> FlowRun:
    """Submit a check to the pool, let the worker look for work once, return the flow run as the server knows it then."""
    async with get_client() as client:
        await client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        flow_id: UUID = await client.create_flow(health_check)
        place = {"path": str(ROOT), "entrypoint": "flows.health:health_check"}
        deployment = await client.create_deployment(
            flow_id, name="tiny", work_pool_name=POOL, parameters={"config": config}, **place
        )
        submitted = await client.create_flow_run_from_deployment(deployment)
        async with InProcessWorker(work_pool_name=POOL, name="test", limit=1, prefetch_seconds=60) as worker:
            await worker.sync_with_backend()
            await worker.get_and_submit_flow_runs()
        return await client.read_flow_run(submitted.id)


def test_a_submitted_check_is_carried_out_here(config_file: Path, stages: FakeStages, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr("tasks.live_runs.list_runs", lambda _root: looked.append(os.getpid()) or [])
    run = asyncio.run(served(str(config_file)))
    assert run.state is not None
    assert run.state.is_completed(), run.state.message
    assert set(looked) == {os.getpid()}
    assert run.infrastructure_pid is not None
    assert run.infrastructure_pid.endswith(str(os.getpid()))
