"""The tracker while its store is away, refuses, or is another one than before."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from dflash.config import Config, parse_config
from dflash.errors import TrackingError
from dflash.tracking import MlflowTracker, NullTracker, open_tracker, store_uri
from dflash.tracking.state import TrackingState, load_state
from dflash.tracking.tracker import RETRY_AFTER_S
from tests.unit.tracking.tracking_fakes import FakeStore, step_record


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def fresh_state(**changes: Any) -> TrackingState:
    values: dict[str, Any] = {"store": "sqlite:///x.db", "experiment": "dflash", "run_id": "", "segment": 0}
    return TrackingState(**{**values, "log_offset_bytes": 0, "last_step": -1, "sending": False, **changes})


def tracker_on(store: FakeStore, folder: Path, *, clock: Clock | None = None, state: TrackingState | None = None) -> MlflowTracker:
    return MlflowTracker(
        store.connect,  # type: ignore[arg-type] - a fake with the same methods
        uri="https://me:secret@host/mlflow",
        run_name="demo-001.s0",
        tags={"group": "demo"},
        state=state or fresh_state(),
        state_path=folder / "tracking.json",
        clock=clock or Clock(),
    )


def test_what_was_asked_for_while_the_store_was_away_arrives_in_order_once_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, clock = FakeStore(away=True), Clock()
    tracker = tracker_on(store, tmp_path, clock=clock)
    with caplog.at_level(logging.INFO, logger="dflash"):
        tracker.log_params({"train.lr": "0.1"})
        tracker.set_tags({"verdict": "watch"})
        tracker.set_tags({"verdict": "healthy"})
        tracker.log_metrics({"eval/x": 1.0}, step=5)
        assert tracker.run_id is None
        assert not tracker.log_steps([step_record(0)])
        store.away = False
        tracker.set_tags({"late": "1"})
        assert not store.runs, "the store is left alone for a while after a failure"
        clock.now_s += RETRY_AFTER_S
        assert tracker.connect()
    run = store.runs["run0"]
    assert run["params"] == {"train.lr": "0.1"}
    assert run["tags"] == {"group": "demo", "verdict": "healthy", "late": "1"}
    assert [(point.name, point.step) for point in run["points"]] == [("eval/x", 5)], "steps are the forwarder's to send again"
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "secret" not in caplog.text


def test_a_value_that_the_store_refuses_is_told_once_and_blocks_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = FakeStore()
    tracker = tracker_on(store, tmp_path)
    tracker.log_params({"train.lr": "0.1"})
    with caplog.at_level(logging.WARNING, logger="dflash"):
        tracker.log_params({"train.lr": "0.2"})
        tracker.log_params({"train.lr": "0.3"})
        tracker.set_tags({"after": "yes"})
    assert store.runs["run0"]["params"] == {"train.lr": "0.1"}
    assert store.runs["run0"]["tags"]["after"] == "yes"
    assert [record.getMessage() for record in caplog.records] == [
        "parameters of this run cannot be logged: parameters are immutable"
    ]


def test_finishing_tries_once_more_and_names_what_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = FakeStore(away=True)
    tracker = tracker_on(store, tmp_path)
    tracker.log_params({"a": "1"})
    with caplog.at_level(logging.WARNING, logger="dflash"):
        tracker.finish("FINISHED")
    assert "not logged: parameters, end of the run" in caplog.text
    store.away = False
    tracker.finish("KILLED")
    assert store.runs["run0"]["params"] == {"a": "1"}
    assert store.runs["run0"]["status"] == "KILLED"


def test_a_second_process_continues_the_same_run(tmp_path: Path) -> None:
    store = FakeStore()
    first = tracker_on(store, tmp_path)
    first.log_params({"a": "1"})
    first.finish("FINISHED")
    second = tracker_on(store, tmp_path, state=load_state(tmp_path / "tracking.json"))
    second.log_metrics({"eval/x": 1.0}, step=1)
    assert list(store.runs) == ["run0"] == [second.run_id]
    assert store.runs["run0"]["status"] == "RUNNING"


def test_a_run_that_was_deleted_is_begun_again_with_the_whole_log(tmp_path: Path) -> None:
    store = FakeStore()
    tracker = tracker_on(store, tmp_path, state=fresh_state(run_id="gone", log_offset_bytes=500, last_step=9))
    assert tracker.connect()
    state = load_state(tmp_path / "tracking.json")
    assert state is not None
    assert (state.run_id, state.log_offset_bytes, state.last_step) == ("run0", 0, -1)


def test_an_artifact_that_does_not_exist_is_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match=r"no\.json does not exist"):
        tracker_on(FakeStore(), tmp_path).log_artifact(tmp_path / "no.json", "eval")


def config_of(tmp_path: Path, *overrides: str) -> Config:
    text = "target: {path: demo, mask_token: '<|mask|>'}\ndata: {num_conversations: 4}\n"
    return parse_config(text, origin="test", overrides=[f"run.root={tmp_path}", *overrides])


def test_the_environment_wins_over_the_configuration_and_the_default_lies_beside_the_runs(tmp_path: Path) -> None:
    assert store_uri(config_of(tmp_path), {}) == f"sqlite:///{tmp_path}/mlflow.db"
    configured = config_of(tmp_path, "tracking.uri=http://127.0.0.1:5000")
    assert store_uri(configured, {}) == "http://127.0.0.1:5000"
    assert store_uri(configured, {"MLFLOW_TRACKING_URI": "postgresql+psycopg://db/x"}) == "postgresql+psycopg://db/x"


@pytest.mark.parametrize("uri", ["./mlruns", "file:///tmp/mlruns", "ftp://host/x"])
def test_an_address_that_is_no_store_is_a_user_error_and_shows_no_secret(tmp_path: Path, uri: str) -> None:
    with pytest.raises(TrackingError, match="neither a database nor a server"):
        store_uri(config_of(tmp_path, f"tracking.uri={uri}"), {})
    with pytest.raises(TrackingError) as caught:
        store_uri(config_of(tmp_path), {"MLFLOW_TRACKING_URI": "ftp://me:hunter2@host/x"})
    assert "hunter2" not in str(caught.value)


def test_tracking_that_is_switched_off_touches_nothing(tmp_path: Path) -> None:
    config = config_of(tmp_path, "tracking.enabled=false")
    tracker = open_tracker(
        config, run_name="demo-001", group="demo", segment=0, state_path=tmp_path / "tracking.json", more_tags={}
    )
    assert isinstance(tracker, NullTracker)
    tracker.log_params({"a": "1"})
    assert tracker.log_steps([step_record(0)])
    tracker.finish("FINISHED")
    assert not tracker.connect()
    assert list(tmp_path.iterdir()) == []
