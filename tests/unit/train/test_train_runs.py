"""A run's folder, its lock, its requests and its bookkeeping."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path

import pytest

from dflash.checkpoint import LATEST_CLEAN, Evidence, list_checkpoints, read_ledger, read_pointer
from dflash.config import CheckpointConfig, Config, RollbackConfig, load_config, parse_config
from dflash.data.pointer import read_data_pointer
from dflash.errors import CheckpointError, DflashError, NonFiniteLimitError, RunStateError, TargetError
from dflash.records import ControlRequest, RollbackPlan, RunPaths, to_json
from dflash.rollback import Acknowledge, Facts, next_action
from dflash.train.book import CheckpointBook
from dflash.train.outcome import error_of, read_exit, write_exit
from dflash.train.requests import acknowledge, ask, decisions, halted_by, pending_requests
from dflash.train.runs import hold_run, prepare_run, run_is_live, training_hash, training_identity
from tests.support.checkpoints import save_at

RULE = CheckpointConfig(interval_steps=10, window_steps=10, soak_steps=10, keep_clean=2, keep_other=0)


def config_of(*overrides: str) -> Config:
    text = "target: {mask_token_id: 3}\ndata: {num_conversations: 5}"
    return parse_config(text, origin="test", overrides=overrides)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "runs" / "demo-001")


def test_a_prepared_run_names_its_configuration_and_data(paths: RunPaths, tmp_path: Path) -> None:
    config = config_of()
    prepare_run(config, paths, location=tmp_path / "data", fingerprint="f" * 64)
    assert load_config(paths.config) == config
    assert read_data_pointer(paths).location == str(tmp_path / "data")
    assert read_data_pointer(paths).fingerprint == "f" * 64
    prepare_run(config, paths, location=tmp_path / "data", fingerprint="f" * 64)


@pytest.mark.parametrize(
    "override",
    [
        "train.lr=0.5",
        "run.seed=4",
        "drafter.block_size=4",
        "plan.tokens_per_batch=2048",
        "train.loss.gamma=2",
        "cluster.torch_threads=2",
    ],
)
def test_a_run_refuses_another_configuration_and_shows_the_difference(paths: RunPaths, tmp_path: Path, override: str) -> None:
    prepare_run(config_of(), paths, location=tmp_path, fingerprint="f")
    before = paths.config.read_text()
    key, value = override.split("=")
    with pytest.raises(RunStateError, match=rf"{key}: .* -> {value}"):
        prepare_run(config_of(override), paths, location=tmp_path, fingerprint="f")
    assert paths.config.read_text() == before
    assert training_hash(config_of()) != training_hash(config_of(override))


@pytest.mark.parametrize(
    "override",
    [
        "cluster.targets_per_replica=3",
        "health.stale_factor=20",
        "checkpoint.interval_steps=7",
        "train.queues.ready_bytes=9",
        "data.reader.threads=3",
        "data.reader.prefetch_batches=0",
        "data.runner_address=tcp://elsewhere:1",
        "data.workers=2",
        "data.store=elsewhere",
    ],
)
def test_settings_that_do_not_touch_the_numbers_may_change(paths: RunPaths, tmp_path: Path, override: str) -> None:
    prepare_run(config_of(), paths, location=tmp_path, fingerprint="f")
    prepare_run(config_of(override), paths, location=tmp_path, fingerprint="f")
    assert load_config(paths.config) == config_of(override)
    assert training_hash(config_of()) == training_hash(config_of(override))


def test_the_training_identity_holds_every_key_of_the_training_and_the_data() -> None:
    keys = set(training_identity(config_of()))
    for wanted in ("train.lr", "train.optimizer.beta2", "train.anchors.max_per_batch", "data.seed", "target.mask_token_id"):
        assert wanted in keys
    assert not [key for key in keys if key.startswith(("health.", "tracking.", "evaluate.", "checkpoint."))]


def test_a_run_may_train_on_a_data_set_in_an_object_store(paths: RunPaths, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prepare_run(config_of(), paths, location="s3://bucket/sets/0123", fingerprint="f")
    assert read_data_pointer(paths).location == "s3://bucket/sets/0123"
    monkeypatch.chdir(tmp_path)
    prepare_run(config_of(), paths, location="sets/0123", fingerprint="f")
    assert read_data_pointer(paths).location == str(tmp_path / "sets/0123"), "found from any working directory"


def test_a_run_refuses_another_data_set(paths: RunPaths, tmp_path: Path) -> None:
    prepare_run(config_of(), paths, location=tmp_path, fingerprint="a" * 64)
    with pytest.raises(RunStateError, match="aaaaaaaaaaaaaaaa, not on bbbbbbbbbbbbbbbb"):
        prepare_run(config_of(), paths, location=tmp_path, fingerprint="b" * 64)


@pytest.mark.parametrize("content", [None, "{", '{"dir": 3}', "[]"])
def test_an_unprepared_run_says_so(paths: RunPaths, content: str | None) -> None:
    paths.root.mkdir(parents=True)
    if content is not None:
        paths.data_pointer.write_text(content)
    with pytest.raises(RunStateError, match=r"data\.json is missing or malformed"):
        read_data_pointer(paths)


def test_one_supervisor_at_a_time_and_it_is_seen(paths: RunPaths) -> None:
    assert not run_is_live(paths)
    with hold_run(paths):
        assert run_is_live(paths)
        paths.heartbeat.write_text('{"pid": 4711}')
        with pytest.raises(RunStateError, match=r"another supervisor \(pid 4711\)"), hold_run(paths):
            pytest.fail("two supervisors hold one run")
    assert not run_is_live(paths)
    with hold_run(paths):
        pass


def test_probing_never_keeps_a_supervisor_out(paths: RunPaths) -> None:
    with hold_run(paths):
        pass
    done = threading.Event()

    def probe() -> None:
        while not done.is_set():
            run_is_live(paths)

    prober = threading.Thread(target=probe)
    prober.start()
    try:
        for _ in range(50):
            with hold_run(paths):
                pass
    finally:
        done.set()
        prober.join()


def request_of(key: str, *, requested_at: str = "2026-01-01", action: str = "stop") -> ControlRequest:
    return ControlRequest(key=key, action=action, reason="why", requested_at=requested_at, requested_by="test")  # type: ignore[arg-type]


def test_requests_are_pending_until_acknowledged_oldest_first(paths: RunPaths) -> None:
    assert pending_requests(paths) == []
    paths.requests_dir.mkdir(parents=True)
    for key, at in (("b", "2026-01-01"), ("a", "2026-01-02")):
        (paths.requests_dir / f"{key}.json").write_text(to_json(request_of(key, requested_at=at)))
    assert [request.key for request in pending_requests(paths)] == ["b", "a"]
    acknowledge(paths, "b", outcome="done")
    assert [request.key for request in pending_requests(paths)] == ["a"]
    assert json.loads((paths.requests_dir / "b.ack.json").read_text())["outcome"] == "done"


@pytest.mark.parametrize(
    "content", ["{", "{}", to_json(request_of("other")), to_json(request_of("bad")).replace('"stop"', '"explode"')]
)
def test_a_malformed_request_is_refused_once_and_says_why(paths: RunPaths, content: str) -> None:
    paths.requests_dir.mkdir(parents=True)
    (paths.requests_dir / "bad.json").write_text(content)
    assert pending_requests(paths) == []
    assert json.loads((paths.requests_dir / "bad.ack.json").read_text())["outcome"].startswith("refused: ")
    assert pending_requests(paths) == []
    assert halted_by(paths) is None, "a run with a malformed file among its requests can still be continued"


def test_what_was_decided_is_read_whatever_became_of_it_and_a_misnamed_file_decides_nothing(paths: RunPaths) -> None:
    plan = RollbackPlan("done", "halt", 4, 0, 70, 75, 70, None, (), None, "why")
    ask(paths, dataclasses.replace(request_of("done", action="halt"), plan=plan))
    acknowledge(paths, "done", outcome="the run is halted")
    ask(paths, request_of("by-hand"))
    (paths.requests_dir / "copy.json").write_bytes((paths.requests_dir / "done.json").read_bytes())
    (paths.requests_dir / "gone.json").symlink_to("nowhere")
    assert decisions(paths) == [plan]
    assert [request.key for request in pending_requests(paths)] == ["by-hand"], "what is taken away meanwhile is no request"


def test_a_halt_that_came_too_late_or_was_refused_halts_nothing(paths: RunPaths, caplog: pytest.LogCaptureFixture) -> None:
    """A trainer that crashed and was started again between decision and supervisor has made its segment a thing of the past."""
    plan = RollbackPlan("late", "halt", 4, 0, 70, 75, 70, None, (), None, "why")
    ask(paths, dataclasses.replace(request_of("late", action="halt"), plan=plan))
    facts = Facts([plan], ledger=(), segment=1, trainer_alive=True, saved={}, verified={}, now_s=0.0)
    answer = next_action(facts)
    assert isinstance(answer, Acknowledge)
    acknowledge(paths, answer.key, outcome=answer.outcome)
    (paths.requests_dir / "bad.json").write_text(to_json(request_of("other", action="halt")))
    assert pending_requests(paths) == []
    assert halted_by(paths) is None
    ask(paths, request_of("meant", action="halt"))
    assert halted_by(paths) is None, "not carried out yet"
    acknowledge(paths, "meant", outcome="the trainer is stopped")
    assert halted_by(paths) == request_of("meant", action="halt")
    (paths.requests_dir / "meant.ack.json").write_text("[]")
    assert halted_by(paths) == request_of("meant", action="halt"), "an answer that cannot be read takes nothing back"
    assert "meant.ack.json cannot be read" in caplog.text


def test_a_trainer_tells_the_supervisor_its_own_error(paths: RunPaths) -> None:
    paths.control_dir.mkdir(parents=True)
    assert read_exit(paths, segment=0) is None
    for error in (NonFiniteLimitError("what", remedy="do"), TargetError("what", remedy="do")):
        write_exit(paths, segment=3, error=error)
        told = read_exit(paths, segment=3)
        assert told is not None
        raised = error_of(told)
        assert type(raised) is type(error)
        assert str(raised) == str(error)
        assert raised is not None and raised.exit_code == error.exit_code
        assert read_exit(paths, segment=4) is None, "an older segment's end says nothing about this one"
    write_exit(paths, segment=3, error=None)
    finished = read_exit(paths, segment=3)
    assert finished is not None and error_of(finished) is None
    paths.trainer_exit.write_text("{")
    assert read_exit(paths, segment=3) is None


def test_an_unknown_error_class_is_still_an_error_of_the_package(paths: RunPaths) -> None:
    paths.control_dir.mkdir(parents=True)
    write_exit(paths, segment=0, error=CheckpointError("what", remedy="do"))
    told = read_exit(paths, segment=0)
    assert told is not None
    assert type(error_of(dataclasses.replace(told, error="NoSuchError"))) is DflashError


def states_of(paths: RunPaths) -> list[tuple[int, str]]:
    return [(item.step, item.state) for item in read_ledger(paths.ledger)]


def evidence(judged: int, *, spans: tuple[tuple[int, int], ...] = (), ended: bool = False) -> Evidence:
    return Evidence(
        critical_spans=spans, judged_records=judged, coverage_frac=lambda _first, _end: 1.0, min_coverage_frac=0.99, ended=ended
    )


def test_the_book_notes_folders_once_and_judges_them_when_due(paths: RunPaths) -> None:
    save_at(paths.checkpoints_dir, 0)
    save_at(paths.checkpoints_dir, 10)
    book = CheckpointBook(paths, RULE, RollbackConfig())
    assert book.reconcile()
    assert not book.reconcile()
    assert states_of(paths) == [(step, state) for step in (0, 10) for state in ("writing", "durable", "probation")]
    assert book.is_due(records=0), "step-0 needs no soak"
    book.judge(evidence(0))
    assert states_of(paths)[-1] == (0, "clean")
    assert not book.is_due(records=19)
    assert book.is_due(records=20)
    book.judge(evidence(20))
    assert states_of(paths)[-1] == (10, "clean")
    assert read_pointer(paths.checkpoints_dir, LATEST_CLEAN) == 10
    again = CheckpointBook(paths, RULE, RollbackConfig())
    assert not again.reconcile(), "a restarted supervisor knows what was noted"
    assert not again.is_due(records=100)


def test_the_book_goes_back_to_the_newest_that_verifies_and_marks_the_others_bad(
    paths: RunPaths, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (0, 10, 20, 30):
        save_at(paths.checkpoints_dir, step)
    (paths.checkpoint(20) / "drafter.safetensors").write_bytes(b"x")
    (paths.checkpoint(30) / "manifest.json").write_text("{")
    book = CheckpointBook(paths, RULE, RollbackConfig())
    assert book.newest_verified() == 10
    assert "step-20 cannot be used" in caplog.text
    assert dict(states_of(paths)) == {0: "probation", 10: "probation", 20: "bad", 30: "bad"}
    save_at(paths.checkpoints_dir, 20, segment=1)
    assert book.newest_verified() == 20
    assert book.last_segment == 1
    for step in (0, 10, 20):
        (paths.checkpoint(step) / "drafter.safetensors").write_bytes(b"x")
    assert book.newest_verified() is None


def test_an_onset_dated_back_demotes_and_moves_latest_clean(paths: RunPaths) -> None:
    for step in (0, 10, 20):
        save_at(paths.checkpoints_dir, step)
    book = CheckpointBook(paths, RULE, RollbackConfig())
    book.reconcile()
    book.judge(evidence(30))
    assert read_pointer(paths.checkpoints_dir, LATEST_CLEAN) == 20
    book.judge(evidence(40, spans=((25, 39),)))
    assert dict(states_of(paths))[20] == "suspect"
    assert read_pointer(paths.checkpoints_dir, LATEST_CLEAN) == 10


def test_pruning_deletes_only_after_newer_ones_are_clean(paths: RunPaths) -> None:
    steps = (0, 10, 20, 30, 40)
    for step in steps:
        save_at(paths.checkpoints_dir, step)
    book = CheckpointBook(paths, RULE, RollbackConfig())
    book.reconcile()
    book.prune(spare=())
    assert list_checkpoints(paths.checkpoints_dir) == list(steps)
    book.judge(evidence(40))
    book.prune(spare=())
    assert list_checkpoints(paths.checkpoints_dir) == [0, 20, 30, 40]
    book.judge(evidence(40, ended=True))
    book.prune(spare=())
    assert list_checkpoints(paths.checkpoints_dir) == [0, 30, 40]
