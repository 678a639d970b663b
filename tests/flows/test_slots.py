"""A slot that the server no longer knows, as after its restart, on a real server."""

from __future__ import annotations

import threading
from uuid import UUID

import pytest
from prefect import flow, flow_engine, get_client, runtime
from prefect.concurrency import _leases
from prefect.flow_engine import run_flow
from prefect.states import Pending

from flows.settings import flow_settings
from tasks import slots

pytestmark = pytest.mark.usefixtures("prefect_server")

RENEWAL = "concurrency-lease-renewal"
DONE: list[str] = []


@flow
def work_without_a_slot() -> None:
    """Lose the slot, as a server does that is started again, and go on after it was found out."""
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(UUID(str(runtime.flow_run.id))).state
        assert state is not None
        lease = state.state_details.deployment_concurrency_lease_id
        (renewal,) = (thread for thread in threading.enumerate() if thread.name == f"{RENEWAL}-{lease}")
        client.request("POST", "/v2/concurrency_limits/decrement-with-lease", json={"lease_id": str(lease)})
    renewal.join(60)
    assert not renewal.is_alive()
    DONE.append("work")


def test_work_outlives_the_slot_that_it_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_leases, "_RENEWAL_FRACTION", 0.0003)  # of five minutes
    monkeypatch.setattr(_leases, "_RENEWAL_RETRY_BASE_DELAY", 0.01)
    flow_settings()
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow(work_without_a_slot), name="limited", concurrency_limit=1)
        submitted = client.create_flow_run_from_deployment(deployment)
        client.set_flow_run_state(submitted.id, Pending())  # as a worker does: here the server gives the slot
        state = run_flow(work_without_a_slot, flow_run=client.read_flow_run(submitted.id), return_type="state")
        assert state.is_completed(), state.message
        assert DONE == ["work"]


def test_a_second_call_wraps_nothing_and_an_unknown_prefect_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slots.outlive_lost_slots()
    wrapped = flow_engine.maintain_concurrency_lease
    slots.outlive_lost_slots()
    assert flow_engine.maintain_concurrency_lease is wrapped
    monkeypatch.delattr(flow_engine, slots.KEEPER)
    slots.outlive_lost_slots()
    assert not hasattr(flow_engine, slots.KEEPER)
    assert "may end" in caplog.text
