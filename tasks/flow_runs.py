"""The server's side of a dead run: what it knows of a flow run, forcing a state, starting a deployment once."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from uuid import UUID

from prefect import get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError

from dflash.errors import ServerError
from dflash.stages import Given, Known
from dflash.train.attempts import Attempt

PENDING_LIMIT_S = 300.0
"""A flow run whose worker died between claiming and starting it stays `Pending`; a start takes 10 to 25 s."""

SAID = 300
"""Characters of a server's refusal that are passed on."""

BEFORE = (StateType.SCHEDULED, StateType.PAUSED)
TYPES: dict[Given, StateType] = {
    "Completed": StateType.COMPLETED,
    "Crashed": StateType.CRASHED,
    "Cancelled": StateType.CANCELLED,
    "Failed": StateType.FAILED,
}


class PrefectFlowRuns:
    """`dflash.stages.FlowRuns` on the server that the calling flow talks to."""

    def known(self, flow_run: str) -> Known:
        """What the server says of a flow run."""
        found = read_flow_run(flow_run)
        return "unknown" if found is None or found.state is None else known_of(found.state)

    def give(self, flow_run: str, state: Given, message: str) -> None:
        """Force a state, unless the flow run has that type of state already."""
        found = read_flow_run(flow_run)
        if found is not None and (found.state is None or found.state.type != TYPES[state]):
            force(flow_run, State(type=TYPES[state], name=state, message=message))

    def start(self, attempt: Attempt, *, key: str) -> str:
        """Start the attempt's deployment with its parameters; the server keeps it to once a key."""
        if attempt.deployment is None:
            raise ServerError("a flow that no deployment started cannot be started again", remedy="run its program again")
        try:
            started = run_deployment(
                UUID(attempt.deployment), parameters=dict(attempt.parameters), timeout=0, idempotency_key=key, as_subflow=False
            )
        except ObjectNotFound as error:
            raise ServerError(
                f"the deployment {attempt.deployment} is gone", remedy="deploy again (prefect deploy --all) and run it"
            ) from error
        except PrefectHTTPStatusError as error:  # parameters that a newer version of the code does not take, for one
            said = error.response.text[:SAID]
            raise ServerError(f"the server starts {attempt.deployment} not again: {said}", remedy="run it by hand") from error
        return str(started.id)


def known_of(state: State) -> Known:
    """A state in the words of `dflash.stages.FlowRuns`."""
    if state.type in (StateType.CANCELLING, StateType.CANCELLED):
        return "cancelled"
    if state.type == StateType.CRASHED:
        return "crashed"
    if state.is_final():
        return "ended"
    if state.type == StateType.PENDING and time.time() - state.timestamp.timestamp() > PENDING_LIMIT_S:
        return "crashed"
    return "waiting" if state.type in BEFORE or state.type == StateType.PENDING else "alive"


def read_flow_run(flow_run: str) -> FlowRun | None:
    """A flow run; None if the server does not know it (any more)."""
    with get_client(sync_client=True) as client:
        try:
            return client.read_flow_run(UUID(flow_run))
        except ObjectNotFound:
            return None


def force(flow_run: str, state: State) -> None:
    """Set a state, whatever the present one allows."""
    with get_client(sync_client=True) as client:
        state.timestamp = datetime.now(UTC)
        client.set_flow_run_state(UUID(flow_run), state, force=True)
