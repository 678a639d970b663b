"""Dead runs: each death is answered once, whoever dies meanwhile, and nothing that nobody wants is started again."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dflash.config import dump_config, parse_config
from dflash.records import ControlRequest, RunPaths, to_json
from dflash.stages import revive as room
from dflash.stages.revive import Known, Revival, revive_stage
from dflash.train.attempts import Attempt, any_unsettled, attempts, begin_attempt, deaths, end_attempt, end_of
from dflash.train.processes import identify, recorded_processes, register_process
from dflash.train.requests import acknowledge
from dflash.train.runs import hold_run


class Killed(BaseException):
    """The health flow dies here."""


@dataclass
class Server:
    """A server that keeps flow runs and idempotency keys; `states` as `known` tells them."""

    states: dict[str, Known]
    given: list[tuple[str, str]] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)
    creates: int = 0

    def known(self, flow_run: str) -> Known:
        return self.states.get(flow_run, "unknown")

    def give(self, flow_run: str, state: str, message: str) -> None:
        assert message
        self.given.append((flow_run, state))
        self.states[flow_run] = {"Crashed": "crashed", "Cancelled": "cancelled"}.get(state, "ended")  # type: ignore[assignment]

    def start(self, attempt: Attempt, *, key: str) -> str:
        assert attempt.deployment == "d"
        assert attempt.parameters == {"config": "a.yaml"}
        if key not in self.keys:
            self.creates += 1
            self.keys[key] = f"again-{self.creates}"
            self.states[self.keys[key]] = "waiting"
        return self.keys[key]


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run folder whose flow run `a` is dead."""
    run = RunPaths(tmp_path / "demo-001")
    run.control_dir.mkdir(parents=True)
    text = f"run: {{root: {tmp_path}, name: demo}}\ntarget: {{mask_token: x}}\ndata: {{num_conversations: 3}}"
    run.config.write_text(dump_config(parse_config(text, origin="test")))
    dead_flow_run(run, "a")
    return run


def dead_flow_run(paths: RunPaths, name: str, *, deployment: str | None = "d") -> None:
    """An attempt whose process is gone: this one, born a tick earlier."""
    begin_attempt(paths, flow_run=name, deployment=deployment, parameters={"config": "a.yaml"})
    file = paths.attempts_dir / f"{name}.json"
    noted = json.loads(file.read_text())
    noted["process"]["start_ticks"] -= 1
    file.write_text(json.dumps(noted))


def log_of(paths: RunPaths, steps: int) -> None:
    lines = ({"kind": "step", "segment": 0, "step": step, "step_time_s": 0.1, "wait_time_s": 0.0} for step in range(steps))
    paths.log.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_nothing_is_left_to_look_at_once_a_death_was_answered(paths: RunPaths) -> None:
    assert any_unsettled(paths)
    only(revive_stage(paths.root, server=Server({"a": "cancelled"})))
    assert any_unsettled(paths), "the server has not been asked about that end yet"
    assert revive_stage(paths.root, server=Server({"a": "cancelled"})) == []
    assert not any_unsettled(paths)


def only(revivals: list[Revival]) -> Revival:
    (revival,) = revivals
    return revival


def test_a_dead_run_is_reaped_told_and_started_again_once(paths: RunPaths) -> None:
    server = Server({"a": "alive"})
    log_of(paths, 7)
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as orphan:
        left = identify(orphan.pid, role="trainer")
        assert left is not None
        register_process(paths, left)
        revival = only(revive_stage(paths.root, server=server))
    assert orphan.returncode == -15
    assert recorded_processes(paths) == []
    assert (revival.continued_by, revival.loud, revival.reason) == ("again-1", False, "its process died at step 7")
    assert server.given == [("a", "Crashed")]
    for _ in range(3):
        assert revive_stage(paths.root, server=server) == []
    assert server.creates == 1
    end = end_of(paths, "a")
    assert end is not None
    assert (end.how, end.records, end.continued_by) == ("died", 7, "again-1")


STEPS: tuple[tuple[Any, str], ...] = (
    (Server, "known"),
    (room, "end_recorded"),
    (Server, "give"),
    (Server, "start"),
    (room, "announce_attempt"),
    (room, "end_attempt"),
)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", range(len(STEPS)), ids=[name for _, name in STEPS])
def test_a_health_flow_that_is_killed_between_any_two_effects_is_repeated_and_does_the_right_thing_once(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, step: int, late: bool
) -> None:
    owner, name = STEPS[step]
    stock: Callable[..., Any] = getattr(owner, name)

    def dies(*arguments: Any, **keywords: Any) -> Any:
        if late:
            stock(*arguments, **keywords)
        raise Killed

    server = Server({"a": "alive"})
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, dies)
        for _ in range(2):
            with contextlib.suppress(Killed):
                revive_stage(paths.root, server=server)
    for _ in range(2):
        revive_stage(paths.root, server=server)
    assert server.creates == 1
    assert set(server.given) == {("a", "Crashed")}
    assert [attempt.flow_run for attempt in attempts(paths)] == ["a", "again-1"]
    assert len(deaths(paths)) == 1
    end = end_of(paths, "a")
    assert end is not None
    assert end.continued_by in ("again-1", None)


def test_the_new_flow_run_that_has_begun_before_the_note_is_not_disturbed(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server({"a": "alive"})

    def dies(*_arguments: Any, **_keywords: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(room, "announce_attempt", dies)
        with pytest.raises(Killed):
            revive_stage(paths.root, server=server)
    server.states["again-1"] = "alive"
    begin_attempt(paths, flow_run="again-1", deployment="d", parameters={"config": "a.yaml"})
    with hold_run(paths):
        revival = only(revive_stage(paths.root, server=server))
    assert revival.continued_by is None
    assert "another flow run has taken its place" in revival.reason
    assert server.creates == 1
    assert server.given == [("a", "Crashed"), ("a", "Crashed")]
    assert len(deaths(paths)) == 1


def test_many_health_flows_at_once_are_one(paths: RunPaths) -> None:
    server = Server({"a": "crashed"})
    found: list[Revival] = []
    threads = [threading.Thread(target=lambda: found.extend(revive_stage(paths.root, server=server))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1
    assert server.creates == 1


@pytest.mark.parametrize(("known", "given"), [("cancelled", [("a", "Cancelled")]), ("ended", []), ("unknown", [])], ids=str)
def test_what_nobody_wants_any_more_is_closed_and_not_started_again(
    paths: RunPaths, known: Known, given: list[tuple[str, str]]
) -> None:
    server = Server({"a": known})
    revival = only(revive_stage(paths.root, server=server))
    assert (revival.continued_by, server.creates, server.given) == (None, 0, given)
    assert deaths(paths) == []
    assert revive_stage(paths.root, server=server) == []


def test_a_halted_run_fails_loudly_and_stays_down(paths: RunPaths) -> None:
    paths.requests_dir.mkdir()
    request = ControlRequest("h", "halt", "the loss diverged", "2026-01-01T00:00:00+00:00", "a person")
    (paths.requests_dir / "h.json").write_text(to_json(request))
    acknowledge(paths, "h", outcome="the trainer is stopped")
    server = Server({"a": "alive"})
    revival = only(revive_stage(paths.root, server=server))
    assert revival.loud
    assert "halted: the loss diverged" in revival.reason
    assert (server.given, server.creates) == ([("a", "Failed")], 0)


def test_a_run_that_dies_without_progress_is_given_up_after_its_budget_and_progress_clears_it(paths: RunPaths) -> None:
    server = Server({"a": "alive"})
    flow_run = "a"
    for death in range(2):
        log_of(paths, 10 + death)
        revival = only(revive_stage(paths.root, server=server))
        assert revival.continued_by is not None
        flow_run = revival.continued_by
        server.states[flow_run] = "alive"
        dead_flow_run(paths, flow_run)
    log_of(paths, 12)
    revival = only(revive_stage(paths.root, server=server))
    assert revival.continued_by is None
    assert revival.loud
    assert "died 3 times in a row" in revival.reason
    assert server.given[-1] == (flow_run, "Failed")

    dead_flow_run(paths, "by-hand")
    server.states["by-hand"] = "alive"
    log_of(paths, 12 + 500)
    assert only(revive_stage(paths.root, server=server)).continued_by == "again-3", "500 new steps: another story"


def test_a_finished_run_and_one_that_no_deployment_started_are_told_but_not_started(paths: RunPaths) -> None:
    paths.summary.write_text("{}")
    server = Server({"a": "alive", "b": "alive"})
    assert only(revive_stage(paths.root, server=server)).continued_by is None
    paths.summary.unlink()
    dead_flow_run(paths, "b", deployment=None)
    revival = only(revive_stage(paths.root, server=server))
    assert (revival.continued_by, revival.loud) == (None, True)
    assert server.given == [("a", "Crashed"), ("b", "Crashed")]
    assert server.creates == 0


def test_an_older_run_of_a_configuration_is_not_started_again(paths: RunPaths) -> None:
    (paths.root.parent / "demo-002").mkdir()
    server = Server({"a": "alive"})
    assert only(revive_stage(paths.root, server=server)).continued_by is None
    assert server.creates == 0


def test_a_successor_that_never_began_is_waited_for_and_replaced_when_it_crashed(paths: RunPaths) -> None:
    server = Server({"a": "alive"})
    assert only(revive_stage(paths.root, server=server)).continued_by == "again-1"
    assert revive_stage(paths.root, server=server) == [], "it waits for a worker"
    server.states["again-1"] = "crashed"
    assert only(revive_stage(paths.root, server=server)).continued_by == "again-2"


def test_a_run_that_somebody_trains_by_hand_keeps_its_processes(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server({"a": "alive"})
    monkeypatch.setattr("dflash.train.attempts.run_is_live", lambda _paths: False)  # looked a moment too early
    with hold_run(paths):
        assert revive_stage(paths.root, server=server) == []
    assert (server.given, server.creates) == ([], 0)


@pytest.mark.parametrize(
    ("known", "how", "given"),
    [
        ("alive", "finished", "Completed"),
        ("alive", "InterruptedRunError", "Failed"),
        ("waiting", "HaltedError", "Failed"),
        ("crashed", "finished", "Completed"),
        ("crashed", "HaltedError", "Failed"),
        ("crashed", "TerminationSignal", None),
        ("cancelled", "InterruptedRunError", "Cancelled"),
        ("ended", "finished", None),
        ("unknown", "finished", None),
    ],
)
def test_an_end_that_the_server_has_not_heard_of_is_told_once(paths: RunPaths, known: Known, how: str, given: str | None) -> None:
    """A flow run that is still on its way to `Cancelled` holds its slot, so that no other of its deployment would ever run."""
    end_attempt(paths, "a", how=how, records=3, continued_by=None)
    server = Server({"a": known})
    for _ in range(2):
        assert revive_stage(paths.root, server=server) == []
    assert server.given == ([] if given is None else [("a", given)])
    assert server.creates == 0


def test_a_retried_flow_run_that_dies_is_started_again_although_it_had_ended_and_been_continued(paths: RunPaths) -> None:
    server = Server({"a": "alive"})
    assert only(revive_stage(paths.root, server=server)).continued_by == "again-1"
    begin_attempt(paths, flow_run="again-1", deployment="d", parameters={"config": "a.yaml"})
    end_attempt(paths, "again-1", how="finished", records=3, continued_by=None)
    server.states |= {"again-1": "ended", "a": "alive"}
    dead_flow_run(paths, "a")
    assert only(revive_stage(paths.root, server=server)).continued_by == "again-2"
