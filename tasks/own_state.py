"""A flow run's watch over its own state at the server, for as long as it trains.

A worker that was killed delivers no cancellation: the flow run stays `Cancelling`, its training would go on for days. And a server
that was away has missed heartbeats, so an automation calls a living flow run crashed. The watch turns the first into a request to
stop (the supervisor drains and saves), and takes the second back. While the server is away it knows nothing, and waits.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from prefect.client.schemas.objects import FlowRun, State, StateType

from dflash.records import ControlRequest, RunPaths
from dflash.train.requests import acknowledge, ask, decisions, pending_requests
from tasks.events import pass_on
from tasks.flow_runs import force, read_flow_run

logger = logging.getLogger(__name__)

LOOK_EVERY_S, CLOSE_TIMEOUT_S = 10.0, 5.0
ASKED_BY = "flow-run"
ENDS = (StateType.CANCELLING, StateType.CANCELLED, StateType.FAILED, StateType.COMPLETED)

CANCELLED: set[str] = set()  # flow runs of this process that were found on their way to `Cancelled`


def stay_cancelled(_flow: Any, flow_run: FlowRun, state: State[Any]) -> None:
    """Flow hook: a flow run that was cancelled ends as that, and not as a failure, whether or not a worker is left to say so."""
    end_cancelled(str(flow_run.id), state.message)


def end_cancelled(flow_run: str | None, message: str | None) -> None:
    """Give a flow run that was cancelled its last state; any other is left alone."""
    if flow_run is not None and str(flow_run) in CANCELLED:
        force(str(flow_run), State(type=StateType.CANCELLED, name="Cancelled", message=message))


class OwnState:
    """A context manager around a training of the flow run `flow_run` (None without a server)."""

    def __init__(self, paths: RunPaths, flow_run: str | None) -> None:
        self._paths, self._flow_run = paths, flow_run
        self._closing = threading.Event()
        self._told: set[str] = set()
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(self._watch,), name="own-state", daemon=True)

    def __enter__(self) -> Self:
        self._forget("its flow run is gone")
        self._told = {plan.key for plan in decisions(self._paths)}
        if self._flow_run is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closing.set()
        if self._flow_run is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        pass_on(self._paths, self._told)
        self._forget("the training has ended")

    def _watch(self) -> None:
        while not self._closing.wait(LOOK_EVERY_S):
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - whatever the client raises, the training goes on
                logger.debug("the flow run's own state could not be read: %s: %s", type(error).__name__, error)

    def look(self) -> None:
        """Look once: pass on what was decided, obey a cancellation, contradict a false report of death."""
        found = None if self._flow_run is None else read_flow_run(self._flow_run)
        pass_on(self._paths, self._told)  # now that the server has answered: an event for one that is away is not kept for long
        state = None if found is None else found.state
        if found is None or state is None or self._closing.is_set():
            return
        if state.type in (StateType.CANCELLING, StateType.CANCELLED):
            CANCELLED.add(str(found.id))
        if state.type in ENDS:
            self._ask_to_stop(state)
        elif state.type == StateType.CRASHED:
            logger.warning("the server calls this flow run crashed (%s), but it trains: taken back", state.message)
            force(str(found.id), State(type=StateType.RUNNING, name="Running", message="it was called crashed, but it trains"))

    def _ask_to_stop(self, state: State) -> None:
        reason, now = f"its flow run is {state.name} at the server", datetime.now(UTC).isoformat(timespec="seconds")
        if ask(self._paths, ControlRequest(f"{ASKED_BY}-{self._flow_run}", "stop", reason, now, ASKED_BY)):
            logger.warning("%s: asking the supervisor to stop", reason)

    def _forget(self, outcome: str) -> None:
        """A request to stop is for the training that it was meant for, and never for the next one."""
        for request in pending_requests(self._paths):
            if request.requested_by == ASKED_BY:
                acknowledge(self._paths, request.key, outcome=outcome)
