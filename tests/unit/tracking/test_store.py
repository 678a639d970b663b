"""The door to MLflow itself, on a real SQLite store, and a server that does not answer."""

from __future__ import annotations

import json
import logging
import os
import socket
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException

from dflash.config import flat_params, parse_config
from dflash.records import BucketStats, DataManifest, RunPaths, ShardEntry, to_json
from dflash.tracking import LogForwarder, Tracker, load_state, open_tracker
from dflash.tracking.state import TrackingState
from dflash.tracking.store import MetricPoint, Store, StoreRefusalError, StoreUnreachableError, translated
from tests.unit.tracking.tracking_fakes import line_of, no_rollback, step_record

TEXT = "target: {path: demo, mask_token: '<|mask|>'}\ndata: {num_conversations: 4}\n"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of runs for all tests of this module: a new SQLite store costs seconds."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(autouse=True)
def _no_store_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def opened(root: Path, name: str, *, segment: int = 0, overrides: tuple[str, ...] = ()) -> tuple[Tracker, RunPaths]:
    config = parse_config(TEXT, origin="test", overrides=[f"run.root={root}", *overrides])
    paths = RunPaths(root / name)
    paths.root.mkdir(exist_ok=True)
    return open_tracker(config, run_name=name, group="demo", segment=segment, state_path=paths.tracking_state, more_tags={}), paths


def known(paths: RunPaths) -> TrackingState:
    state = load_state(paths.tracking_state)
    assert state is not None
    return state


def client(root: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{root}/mlflow.db")


def manifest() -> DataManifest:
    shard = ShardEntry(path="bucket=0/part-0-00000-0.parquet", bucket=0, rows=3, size_bytes=10, sha256="0" * 64)
    return DataManifest(
        fingerprint="ab" * 32, recipe_fingerprint="ef" * 32, sources=(), target_id="demo", target_fingerprint="cd" * 32,
        tokenizer_sha256="1" * 64, template_sha256="2" * 64, template_flags={}, vocab_size=512, mask_token_id=3,
        mask_token_uses=0, on_policy=True, answer_sampling={}, rows=3, samples=3, tokens=30, supervised_tokens=20,
        max_length_tokens=12, edges_tokens=(48,), quarantined={}, dropped_tokens=0, buckets=(BucketStats(0, 48, 3, 30, 20),),
        prompt_files=(),
        quarantine_files=(), shards=(shard,),
    )  # fmt: skip


def test_a_run_is_in_the_store_with_everything_that_makes_it_comparable(root: Path, tmp_path: Path) -> None:
    tracker, paths = opened(root, "demo-001")
    config = parse_config(TEXT, origin="test", overrides=["train.lr=0.25"])
    tracker.log_params(flat_params(config))
    tracker.log_dataset(manifest(), "s3://data/x", preview_html="<p>page</p>")
    paths.log.write_bytes(b"".join(line_of(step_record(step, ce=3.0 - step / 100)) for step in range(120)))
    assert LogForwarder(paths, tracker, begin_segment=no_rollback).forward() == 120
    tracker.log_metrics({"eval/trained/acceptance_length": 3.25}, step=120)
    (tmp_path / "summary.json").write_text("{}", encoding="utf-8")
    tracker.log_artifact(tmp_path / "summary.json", "summary")
    tracker.set_tags({"health_verdict": "healthy"})
    tracker.finish("FINISHED")

    store = client(root)
    run = store.get_run(tracker.run_id)
    assert run.info.run_name == "demo-001.s0"
    assert run.info.status == "FINISHED"
    assert run.data.params["train.lr"] == "0.25"
    assert {"group": "demo", "segment": "0", "run": "demo-001", "health_verdict": "healthy"}.items() <= run.data.tags.items()
    assert run.inputs.dataset_inputs[0].dataset.digest == ("ab" * 32)[:36]
    assert json.loads(run.inputs.dataset_inputs[0].dataset.profile)["samples"] == 3
    curve = store.get_metric_history(tracker.run_id, "train/loss")
    assert [(point.step, point.value) for point in curve] == [(step, 3.0 - step / 100) for step in range(120)]
    assert run.data.metrics["eval/trained/acceptance_length"] == 3.25
    artifacts = {item.path for folder in ("data", "summary") for item in store.list_artifacts(tracker.run_id, folder)}
    assert artifacts == {"data/manifest.json", "data/preview.html", "summary/summary.json"}
    experiment = store.get_experiment(run.info.experiment_id)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development", "the UI opens on training runs"
    assert (root / "mlartifacts").is_dir(), "artifacts lie beside the runs"


def test_a_resumed_run_keeps_its_id_and_another_segment_gets_its_own(root: Path) -> None:
    first, paths = opened(root, "demo-002")
    paths.log.write_bytes(b"".join(line_of(step_record(step)) for step in range(3)))
    LogForwarder(paths, first, begin_segment=no_rollback).forward()
    first.finish("KILLED")
    again, _ = opened(root, "demo-002")
    assert again.connect()
    assert again.run_id == first.run_id
    assert client(root).get_run(first.run_id).info.status == "RUNNING"
    other, _ = opened(root, "demo-002", segment=1)
    assert other.connect()
    assert other.run_id != first.run_id
    tags = client(root).get_run(other.run_id).data.tags
    assert tags["parent_run"] == first.run_id
    assert tags["segment"] == "1"
    # A process that is killed between the creation of a run and its note in the folder does not leave two.
    paths.tracking_state.write_text(to_json(replace(known(paths), run_id=str(first.run_id), segment=0)))
    after, _ = opened(root, "demo-002", segment=1)
    assert after.connect()
    assert after.run_id == other.run_id


def test_the_store_is_asked_what_it_holds_after_a_crash(root: Path) -> None:
    tracker, paths = opened(root, "demo-003")
    paths.log.write_bytes(b"".join(line_of(step_record(step)) for step in range(4)))
    before = paths.tracking_state
    assert tracker.connect()
    remembered = before.read_text(encoding="utf-8")
    LogForwarder(paths, tracker, begin_segment=no_rollback).forward()
    before.write_text(remembered.replace('"sending": false', '"sending": true'), encoding="utf-8")
    again, _ = opened(root, "demo-003")
    assert LogForwarder(paths, again, begin_segment=no_rollback).forward() == 0
    assert len(client(root).get_metric_history(tracker.run_id, "train/loss")) == 4


def test_a_changed_parameter_is_refused_and_a_deleted_run_is_not_continued(root: Path) -> None:
    store = Store(f"sqlite:///{root}/mlflow.db", experiment="other", artifact_root=root / "mlartifacts")
    run = store.begin_run(name="x", tags={})
    store.log_params(run, {f"key{number}": "1" for number in range(250)})
    with pytest.raises(StoreRefusalError):
        store.log_params(run, {"key7": "2"})
    store.log_metrics(run, [MetricPoint("m", float(number), number, 0) for number in range(2500)])
    assert len(client(root).get_metric_history(run, "m")) == 2500
    assert store.continue_run(run) == "RUNNING"
    store.end_run(run, "FAILED")
    assert [store.continue_run(run), store.continue_run(run)] == ["FAILED", "RUNNING"]
    client(root).delete_run(run)
    assert store.continue_run(run) is None
    assert store.continue_run("0" * 32) is None


def test_a_server_that_does_not_answer_costs_a_warning_and_nothing_else(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        address = f"http://user:hunter2@127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)  # a configuration may not hold a password
        tracker, paths = opened(root, "demo-004")
        paths.log.write_bytes(line_of(step_record(0)))
        with caplog.at_level(logging.WARNING, logger="dflash"):
            tracker.log_params({"a": "1"})
            assert LogForwarder(paths, tracker, begin_segment=no_rollback).forward() == 0
            tracker.finish("FINISHED")
    assert tracker.run_id is None
    assert not paths.tracking_state.exists()
    assert "training goes on" in caplog.text
    assert "hunter2" not in caplog.text


def test_telemetry_is_off_once_a_store_is_open(root: Path) -> None:
    opened(root, "demo-005")[0].connect()
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_no_traceback_of_a_store_that_is_away_holds_its_password() -> None:
    secret = "planted"[::-1]  # a traceback shows lines of this file as well
    with pytest.raises(StoreUnreachableError, match=r"http://\*\*\*@host") as caught, translated():
        raise MlflowException(f"API request to http://me:with/{secret}@host/api failed")
    assert secret not in "".join(traceback.format_exception(caught.value))
