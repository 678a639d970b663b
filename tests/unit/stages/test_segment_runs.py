"""One MLflow run for each segment: whoever dies in a change of segments, and whenever the store is away."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash.config import dump_config, flat_params, parse_config
from dflash.records import RunPaths
from dflash.stages.run import Run, reopen_run
from dflash.stages.tracking import description_of, forwarder_of
from dflash.tracking import NullTracker, Tracker
from tests.unit.tracking.tracking_fakes import FakeStore, line_of, step_record

BACK = {"kind": "event", "event": "rollback_end", "segment": 1, "step": 3, "details": {"target_step": 3, "rung": 1}}
CALLS = ("begin_run", "continue_run", "find_run", "set_tags", "log_params", "log_metrics", "end_run")


class Killed(BaseException):
    """The supervisor dies here."""


class Mortal(FakeStore):
    """A store whose caller dies, or that goes away, at the n-th call from now."""

    left = -1
    late = away_then = False

    def _counted(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self.left -= 1
        now, self.away = self.left == -1, self.away or (self.away_then and self.left < 0)
        if now and not self.late and not self.away_then:
            raise Killed
        result = call(self, *arguments, **named)
        if now and self.late:
            raise Killed
        return result


def counted(name: str) -> Callable[..., Any]:
    stock = getattr(FakeStore, name)

    def call(self: Mortal, *arguments: Any, **named: Any) -> Any:
        return self._counted(stock, *arguments, **named)

    return call


for _name in CALLS:
    setattr(Mortal, _name, counted(_name))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that went back from step 5 to step 3."""
    paths = RunPaths(tmp_path / "demo-001")
    paths.root.mkdir()
    text = f"run: {{root: {tmp_path}, name: demo}}\ntarget: {{mask_token: x}}\ndata: {{num_conversations: 3}}"
    paths.config.write_text(dump_config(parse_config(text, origin="test")))
    return reopen_run(paths.root)


def forward(run: Run, store: FakeStore) -> None:
    """What a new process does."""

    def describe(tracker: Tracker) -> None:
        tracker.log_params({"train.lr": "0.1"})

    forwarder_of(run, describe=describe).forward()


@pytest.mark.parametrize("how", ["killed before", "killed after", "away"])
@pytest.mark.parametrize("calls", range(14))
def test_each_segment_has_one_run_with_its_steps_and_its_tags(
    run: Run, monkeypatch: pytest.MonkeyPatch, calls: int, how: str
) -> None:
    store = Mortal()
    monkeypatch.setattr("dflash.tracking.open.Store", lambda *_arguments, **_named: store.connect())
    run.paths.log.write_bytes(b"".join(line_of(step_record(step)) for step in range(6)))
    forward(run, store)
    with run.paths.log.open("ab") as log:
        log.write(line_of(BACK) + b"".join(line_of(step_record(step, segment=1)) for step in range(3, 7)))
    store.left, store.late, store.away_then = calls, how == "killed after", how == "away"
    with contextlib.suppress(Killed):
        forward(run, store)
    store.left, store.away_then, store.away = -1, False, False
    for _ in range(2):
        forward(run, store)
    first, second = store.runs.values()
    assert (first["name"], first["tags"]["abandoned_for_segment"], first["status"]) == ("demo-001.s0", "1", "KILLED")
    assert second["name"] == "demo-001.s1"
    assert second["tags"].items() >= {"parent_run": "run0", "segment": "1", "rolled_back_to_step": "3", "rung": "1"}.items()
    assert "abandoned_for_segment" not in second["tags"]
    assert [store.steps(run_id) for run_id in store.runs] == [list(range(6)), list(range(3, 7))]


@pytest.mark.parametrize("calls", range(3, 7))
def test_a_process_that_sees_the_store_go_and_come_back_goes_on_in_the_new_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    store = Mortal()
    monkeypatch.setattr("dflash.tracking.open.Store", lambda *_arguments, **_named: store.connect())
    monkeypatch.setattr("dflash.tracking.tracker.RETRY_AFTER_S", 0.0)
    run.paths.log.write_bytes(b"".join(line_of(step_record(step)) for step in range(6)))
    forwarder = forwarder_of(run, describe=lambda tracker: tracker.log_params({"train.lr": "0.1"}))
    forwarder.forward()
    with run.paths.log.open("ab") as log:
        log.write(line_of(BACK) + b"".join(line_of(step_record(step, segment=1)) for step in range(3, 7)))
    store.left, store.away_then = calls, True
    forwarder.forward()
    store.left, store.away_then, store.away = -1, False, False
    for _ in range(2):
        forwarder.forward()
    assert [store.steps(run_id) for run_id in store.runs] == [list(range(6)), list(range(3, 7))]
    assert store.runs["run1"]["params"] == {"train.lr": "0.1"}
    assert forwarder.tracker.run_id == "run1"


def test_another_store_gets_every_segment_too(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stores = [FakeStore(), FakeStore()]
    monkeypatch.setattr("dflash.tracking.open.Store", lambda uri, **_named: stores[uri.endswith("/moved.db")].connect())
    first, second = (
        [line_of(step_record(step, segment=part)) for step in steps] for part, steps in enumerate((range(6), range(3, 7)))
    )
    run.paths.log.write_bytes(b"".join([*first, line_of(BACK), *second]))
    forward(run, stores[0])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/moved.db")
    forward(run, stores[1])
    for store in stores:
        assert [each["name"] for each in store.runs.values()] == ["demo-001.s0", "demo-001.s1"]
        assert [store.steps(run_id) for run_id in store.runs] == [list(range(6)), list(range(3, 7))]


def test_a_segment_whose_run_was_deleted_gets_its_own_steps_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    monkeypatch.setattr("dflash.tracking.open.Store", lambda *_arguments, **_named: store.connect())
    before = [line_of(step_record(step)) for step in range(6)]
    after = [line_of(step_record(step, segment=1)) for step in range(3, 7)]
    run.paths.log.write_bytes(b"".join([*before, line_of(BACK), *after]))
    forward(run, store)
    del store.runs["run1"]
    store.runs["somebody's"] = store.runs["run0"]  # ids are counted: the new one must not get an old one's
    with run.paths.log.open("ab") as log:
        log.write(line_of(step_record(7, segment=1)))
    forward(run, store)
    assert store.steps("run2") == list(range(3, 8))


def test_what_one_call_sets_is_no_parameter_of_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow refuses to change a parameter, and `evaluate --baseline` would warn about it each time."""
    told: list[Mapping[str, str]] = []
    data = SimpleNamespace(manifest=None, location="", fingerprint="")
    for name in ("read_data_pointer", "load_data", "read_preview"):
        monkeypatch.setattr(f"dflash.stages.tracking.{name}", lambda *_, **__: data)
    monkeypatch.setattr(NullTracker, "log_params", lambda _, params: told.append(params))
    description_of(reopen_run(run.paths.root, overrides=["evaluate.baselines=[untrained]"]))(NullTracker())
    assert told == [flat_params(run.config)]
