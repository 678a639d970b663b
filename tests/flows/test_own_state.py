"""A flow run that watches its own state, and what the server knows of flow runs, on a real server."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from prefect import flow, get_client, runtime
from prefect.client.schemas.objects import State, StateType
from prefect.states import Cancelling, Crashed, Pending, Running, Scheduled

from dflash.errors import HaltedError, InterruptedRunError, ServerError, StorageError
from dflash.records import ControlRequest, RollbackPlan, RunPaths
from dflash.stages import Revival, Run
from dflash.train.attempts import attempts, begin_attempt, end_of
from dflash.train.requests import acknowledge, ask, pending_requests
from flows.automations import ZOMBIES, install, zombie_automation
from flows.health import health_check
from flows.train import train
from tasks import events, flow_runs, own_state
from tasks.flow_runs import PrefectFlowRuns, force, known_of, read_flow_run
from tasks.own_state import OwnState
from tests.flows.fake_stages import FakeStages

pytestmark = pytest.mark.usefixtures("prefect_server")


@flow
def nothing() -> None:
    """A flow that can have runs."""


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "tiny-001")


@pytest.fixture
def flow_run() -> str:
    with get_client(sync_client=True) as client:
        return str(client.create_flow_run(nothing, state=Running()).id)


def state_of(flow_run: str) -> State[Any]:
    found = read_flow_run(flow_run)
    assert found is not None
    assert found.state is not None
    return found.state


def test_a_cancellation_that_no_worker_delivers_becomes_one_request_to_stop(paths: RunPaths, flow_run: str) -> None:
    with OwnState(paths, flow_run) as own:
        own.look()
        assert pending_requests(paths) == []
        force(flow_run, Cancelling())
        own.look()
        own.look()
        (request,) = pending_requests(paths)
        assert (request.action, request.requested_by) == ("stop", "flow-run")
        assert "Cancelling" in request.reason
    assert pending_requests(paths) == [], "it was for this training, and never stops the next"
    own_state.stay_cancelled(nothing, read_flow_run(flow_run), State(type=StateType.FAILED, message="stopped"))
    assert state_of(flow_run).type == StateType.CANCELLED


def test_a_flow_run_that_was_cancelled_without_a_worker_ends_as_that(
    config_file: Path, stages: FakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids: list[str] = []

    def cancelled(run: Run, *, on_progress: object) -> None:
        ids.append(str(runtime.flow_run.id))
        force(ids[0], Cancelling())
        OwnState(run.paths, ids[0]).look()
        raise InterruptedRunError("stopped by flow-run", remedy="again")

    monkeypatch.setenv("PREFECT__ENABLE_CANCELLATION_AND_CRASHED_HOOKS", "false")  # as under a worker
    monkeypatch.setattr("tasks.train_drafter.train_stage", cancelled)
    train(str(config_file), return_state=True)
    assert state_of(ids[0]).type == StateType.CANCELLED


def test_a_request_that_an_earlier_flow_run_left_does_not_stop_this_one(paths: RunPaths, flow_run: str) -> None:
    ask(paths, ControlRequest("flow-run-x", "stop", "gone", "2026-01-01T00:00:00+00:00", "flow-run"))
    ask(paths, ControlRequest("by-hand", "stop", "a person", "2026-01-01T00:00:00+00:00", "me"))
    with OwnState(paths, flow_run):
        assert [request.key for request in pending_requests(paths)] == ["by-hand"]


def test_a_false_report_of_death_is_taken_back(paths: RunPaths, flow_run: str) -> None:
    with OwnState(paths, flow_run) as own:
        force(flow_run, Crashed(message="no heartbeat for 90 s"))
        own.look()
        assert state_of(flow_run).is_running()
        assert pending_requests(paths) == []


def test_without_a_flow_run_nothing_is_asked(paths: RunPaths) -> None:
    with OwnState(paths, None) as own:
        own.look()


def test_a_decision_is_told_as_an_event_once(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(events, "emit_event", lambda **event: sent.append(event))
    plan = RollbackPlan("k", "rollback", 1, 0, 70, 75, 70, 50, ((69, 75),), None, "three spikes")
    with OwnState(paths, None) as own:
        ask(paths, ControlRequest("k", "rollback", "three spikes", "2026-01-01T00:00:00+00:00", "health-check", plan))
        acknowledge(paths, "k", outcome="carried out before anybody looked")
        own.look()
        own.look()
    events.decision_event("tiny-001", plan)
    first, second = sent
    assert first["event"] == "dflash.run.decision"
    assert first["payload"]["target_step"] == 50
    assert first["id"] == second["id"], "two flow runs that tell the same are one event"
    assert first["resource"]["prefect.resource.id"] == "dflash.run.tiny-001"


def test_a_decision_waits_for_a_server_that_is_away(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(events, "decision_event", lambda _run, plan: told.append(plan.key))

    def away(_flow_run: str) -> None:
        raise httpx.ConnectError("refused")

    own = OwnState(paths, str(uuid4()))
    plan = RollbackPlan("k", "rollback", 1, 0, 70, 75, 70, 50, ((69, 75),), None, "three spikes")
    ask(paths, ControlRequest("k", "rollback", "three spikes", "2026-01-01T00:00:00+00:00", "health-check", plan))
    with monkeypatch.context() as outage:
        outage.setattr(own_state, "read_flow_run", away)
        with pytest.raises(httpx.ConnectError):
            own.look()
    assert told == []
    own.look()
    assert told == ["k"]


def test_a_flow_run_that_dies_once_more_is_another_event(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(events, "emit_event", lambda **event: sent.append(event["id"]))
    death = Revival("tiny-001", "a", "b", "its process died at step 3", loud=False)
    for revival in (death, death, replace(death, continued_by="c")):
        events.died_event(revival)
    assert sent[0] == sent[1] != sent[2]


def test_a_decision_that_ends_the_training_is_told_at_its_end_and_an_earlier_one_is_not(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(events, "decision_event", lambda _run, plan: told.append(plan.key))
    for key in ("earlier", "now"):
        plan = RollbackPlan(key, "halt", 4, 0, 70, 75, 70, None, (), None, "three spikes")
        with OwnState(paths, None):
            ask(paths, ControlRequest(key, "halt", "three spikes", "2026-01-01T00:00:00+00:00", "health-check", plan))
            acknowledge(paths, key, outcome="the run is halted")
    assert told == ["earlier", "now"]


def test_states_in_the_words_of_the_revival() -> None:
    old = datetime.now(UTC) - timedelta(seconds=flow_runs.PENDING_LIMIT_S + 60)
    assert known_of(Running()) == "alive"
    assert known_of(Scheduled()) == known_of(Pending()) == "waiting"
    assert known_of(Pending(timestamp=old)) == "crashed", "its worker died between claiming and starting it"
    assert known_of(Cancelling()) == "cancelled"
    assert known_of(Crashed()) == "crashed"
    assert known_of(State(type=StateType.FAILED)) == known_of(State(type=StateType.COMPLETED)) == "ended"
    assert PrefectFlowRuns().known(str(uuid4())) == "unknown"


def test_a_state_is_given_once_and_whatever_the_present_one_is(flow_run: str) -> None:
    server = PrefectFlowRuns()
    server.give(flow_run, "Crashed", "its process died")
    first = state_of(flow_run)
    assert (first.type, first.message) == (StateType.CRASHED, "its process died")
    server.give(flow_run, "Crashed", "again")
    assert state_of(flow_run).id == first.id
    server.give(flow_run, "Completed", "it had finished")
    assert state_of(flow_run).is_completed()
    server.give(str(uuid4()), "Crashed", "nobody")


def test_a_deployment_that_does_not_take_the_parameters_any_more_is_told_in_the_servers_words(paths: RunPaths) -> None:
    with get_client(sync_client=True) as client:
        schema = {"type": "object", "properties": {"config": {"type": "string", "pattern": "x$"}}}
        made = client.create_deployment(
            client.create_flow(nothing), name="strict", parameter_openapi_schema=schema, enforce_parameter_schema=True
        )
    attempt = begin_attempt(paths, flow_run=str(uuid4()), deployment=str(made), parameters={"config": "a.yaml"})
    with pytest.raises(ServerError, match=r"'a\.yaml' does not match"):
        PrefectFlowRuns().start(attempt, key="k")
    gone = replace(attempt, deployment=str(uuid4()))
    with pytest.raises(ServerError, match="is gone"):
        PrefectFlowRuns().start(gone, key="k")


def test_the_automation_is_installed_once_and_brought_up_to_date() -> None:
    assert install(zombie_automation(90)) == f"created: {ZOMBIES}"
    assert install(zombie_automation(60)) == f"up to date: {ZOMBIES}"
    with get_client(sync_client=True) as client:
        (known,) = client.read_automations_by_name(ZOMBIES)
    assert known.trigger.within == timedelta(seconds=60)
    (action,) = known.actions
    assert action.state == StateType.CRASHED
    assert zombie_automation(60).trigger.expect == known.trigger.expect


def test_an_end_that_cannot_be_noted_hides_no_reason(
    config_file: Path, stages: FakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object, **_more: object) -> None:
        raise StorageError("cannot write: no space left on device", remedy="make room")

    monkeypatch.setattr("tasks.attempt.end_attempt", full)
    stages.errors["train"] = [InterruptedRunError("stopped", remedy="again")]
    assert "stopped" in str(train(str(config_file), return_state=True).message)


def test_a_flow_notes_that_it_works_on_the_run_and_how_it_ended(
    config_file: Path, stages: FakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(events, "emit_event", lambda **event: sent.append(event))
    stages.errors["train"] = [
        InterruptedRunError("stopped", remedy="again"), HaltedError("run tiny-001 was halted: the loss diverged", remedy="read")
    ]  # fmt: skip
    for _ in range(3):
        train(str(config_file), return_state=True)
    paths = RunPaths(config_file.parent / "runs" / "tiny-001")
    known = attempts(paths)
    assert [attempt.number for attempt in known] == [0, 1, 2]
    assert [attempt.parameters["config"] for attempt in known] == [str(config_file)] * 3
    ends = [end_of(paths, attempt.flow_run) for attempt in known]
    assert [end.how for end in ends if end is not None] == ["InterruptedRunError", "HaltedError", "finished"]
    (event,) = sent
    assert (event["event"], event["payload"]["reason"]) == ("dflash.run.halted", "run tiny-001 was halted: the loss diverged")
    assert health_check(str(config_file)) == [], "nothing died"
