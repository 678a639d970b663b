"""Exact resume: real trainer processes, really killed, end with the numbers of an uninterrupted run."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import psutil
import pytest

from dflash.checkpoint import list_checkpoints, read_state
from dflash.data.plan import load_plan
from dflash.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR
from dflash.train.outcome import read_exit
from dflash.train.schedule import lr_at, warmup_steps
from tests.support.same_training import SAMPLES, assert_same_training, new_run, trained_run
from tests.support.tiny_run import TinyRun, rewrite_config
from tests.support.trainer_process import (
    KillAt,
    end_of,
    final_hashes,
    live_steps,
    log_lines,
    start_trainer,
    train_to_end,
    wait_until,
    wait_until_logged,
)

OVERRIDES = ("train.accumulation_steps=2", "train.epochs=8", "train.loss.objective=dpace", "checkpoint.interval_steps=3")
SAVES_BEFORE_THE_END = 3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def reference(root: Path) -> TinyRun:
    return trained_run(root, *OVERRIDES)


@pytest.fixture
def run(root: Path, reference: TinyRun) -> TinyRun:
    return new_run(root, *OVERRIDES)


def assert_trained_alike(run: TinyRun, reference: TinyRun) -> None:
    steps = len(live_steps(reference.paths))
    assert read_state(reference.paths.checkpoint(steps)).total_steps == steps > 20
    assert_same_training(run, reference)
    assert final_hashes(run.paths, 0) != final_hashes(run.paths, steps)


def test_two_uninterrupted_runs_are_bit_identical(run: TinyRun, reference: TinyRun) -> None:
    train_to_end(run)
    assert_trained_alike(run, reference)


@pytest.mark.parametrize(
    "kill_at",
    [
        KillAt("prepare", 1),
        pytest.param(KillAt("optimizer", 2), marks=pytest.mark.full),
        KillAt("manifest", SAVES_BEFORE_THE_END),
        KillAt("rename", 2),
        pytest.param(KillAt("sync folder", 3), marks=pytest.mark.full),
        KillAt("pointer", 2),
    ],
    ids=lambda kill_at: f"{kill_at.operation}-{kill_at.occurrence}",
)
def test_sigkill_inside_a_save_changes_nothing(run: TinyRun, reference: TinyRun, kill_at: KillAt) -> None:
    assert end_of(start_trainer(run, kill_at=kill_at)) == -signal.SIGKILL
    train_to_end(run)
    assert_trained_alike(run, reference)


@pytest.mark.parametrize("step", [1, pytest.param(7, marks=pytest.mark.full), 20])
def test_sigkill_between_steps_changes_nothing(run: TinyRun, reference: TinyRun, step: int) -> None:
    process = start_trainer(run)
    wait_until_logged(run, step, process=process)
    os.kill(process.pid or 0, signal.SIGKILL)
    assert end_of(process) == -signal.SIGKILL
    train_to_end(run)
    assert_trained_alike(run, reference)


def test_dying_again_and_again_changes_nothing_and_numbers_the_segments(run: TinyRun, reference: TinyRun) -> None:
    for kill_at in (KillAt("state", 2), KillAt("clear", 2), KillAt("drafter", 1), KillAt("manifest", 2)):
        assert end_of(start_trainer(run, kill_at=kill_at)) == -signal.SIGKILL
    train_to_end(run)
    assert_trained_alike(run, reference)
    segments = [line["segment"] for line in log_lines(run.paths)]
    assert sorted(set(segments)) == [0, 1, 2, 3, 4]
    assert segments == sorted(segments)


def test_a_line_torn_by_a_kill_stays_one_line_and_history_stays(run: TinyRun, reference: TinyRun) -> None:
    assert end_of(start_trainer(run, kill_at=KillAt("optimizer", 3))) == -signal.SIGKILL
    torn = b'{"kind":"step","segm'
    with run.paths.log.open("ab") as log:
        log.write(torn)
    before = run.paths.log.read_bytes()
    train_to_end(run)
    after = run.paths.log.read_bytes()
    assert after.startswith(before + b"\n")
    assert after.split(b"\n").count(torn) == 1
    assert_trained_alike(run, reference)


def test_sigterm_saves_and_the_next_start_continues_from_there(run: TinyRun, reference: TinyRun) -> None:
    process = start_trainer(run)
    wait_until_logged(run, 4, process=process)
    os.kill(process.pid or 0, signal.SIGTERM)
    assert end_of(process) == EXIT_INTERRUPTED
    stopped = next(line["step"] for line in log_lines(run.paths) if line.get("event") == "stop_requested")
    assert max(list_checkpoints(run.paths.checkpoints_dir)) == stopped == max(live_steps(run.paths)) + 1
    train_to_end(run)
    resumed = next(line for line in log_lines(run.paths) if line.get("event") == "resume")
    assert (resumed["segment"], resumed["step"]) == (1, stopped)
    assert_trained_alike(run, reference)


def test_a_full_disk_costs_saves_and_neither_steps_nor_records(root: Path) -> None:
    overrides = ("train.epochs=30", "checkpoint.interval_steps=2", "checkpoint.retry_s=0.01")
    quiet, run = trained_run(root, *overrides), new_run(root, *overrides)
    process = start_trainer(run)
    wait_until_logged(run, 6, process=process)
    assert process.pid is not None
    before = resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    worked_s = psutil.Process(process.pid).cpu_times().user
    wait_until(lambda: psutil.Process(process.pid).cpu_times().user > worked_s + 0.4, process=process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, before)
    assert end_of(process) == 0
    assert_trained_alike(run, quiet)
    events = [line["event"] for line in log_lines(run.paths) if line["kind"] == "event"]
    assert "save_failed" in events
    assert "log_drops" not in events


def test_a_damaged_newest_checkpoint_is_passed_over_and_the_end_is_the_same(run: TinyRun, reference: TinyRun) -> None:
    assert end_of(start_trainer(run, kill_at=KillAt("prepare", 3))) == -signal.SIGKILL
    newest = max(list_checkpoints(run.paths.checkpoints_dir))
    file = run.paths.checkpoint(newest) / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    train_to_end(run)
    resumed = next(line for line in log_lines(run.paths) if line.get("event") == "resume")
    assert 0 <= resumed["step"] < newest
    assert_trained_alike(run, reference)


def test_another_number_of_targets_gives_the_same_training(run: TinyRun, reference: TinyRun) -> None:
    assert end_of(start_trainer(run, kill_at=KillAt("manifest", 3))) == -signal.SIGKILL
    changed = rewrite_config(run, overrides=["cluster.targets_per_replica=3", "train.queues.feature_bytes=1"])
    train_to_end(changed)
    assert_trained_alike(changed, reference)
    assert {len(record["target_depths"]) for record in live_steps(run.paths).values()} == {1, 3}


def test_the_log_holds_every_record_of_a_durable_checkpoint(run: TinyRun, reference: TinyRun) -> None:
    assert end_of(start_trainer(run, kill_at=KillAt("pointer", 3))) == -signal.SIGKILL
    newest = max(list_checkpoints(run.paths.checkpoints_dir))
    assert newest > 0
    assert set(range(newest)) <= set(live_steps(run.paths))


def test_the_log_tells_the_whole_story_in_order(reference: TinyRun) -> None:
    lines = log_lines(reference.paths)
    plan = load_plan(reference.paths.plan_dir)
    events = [line for line in lines if line["kind"] == "event"]
    assert [event["event"] for event in events[:2]] == ["start", "config"]
    assert (lines[0]["event"], lines[-1]["event"]) == ("start", "finish")
    steps = live_steps(reference.paths)
    assert events[0]["details"]["total_steps"] == len(steps)
    assert list(steps) == list(range(len(steps)))
    # Everything is consumed exactly once an epoch, in plan order.
    micro = [item for record in steps.values() for item in record["micro_batches"]]
    assert [item["batch_id"] for item in micro] == list(range(len(plan)))
    assert [tuple(item["rows"]) for item in micro] == [batch.rows for batch in plan]
    for epoch in range(reference.config.train.epochs):
        assert sorted(row for item in micro if item["epoch"] == epoch for row in item["rows"]) == list(range(SAMPLES))
    # Planned changes are announced before the record of their step.
    epochs = [event for event in events if event["event"] == "epoch"]
    assert [event["details"]["epoch"] for event in epochs] == list(range(reference.config.train.epochs))
    for event in epochs:
        consumed = [item["batch_id"] for item in steps[event["step"]]["micro_batches"]]
        assert event["details"]["batch_id"] in consumed
        assert lines.index(event) < lines.index(steps[event["step"]])
    changes = [event["step"] for event in events if event["event"] == "lr_change"]
    assert changes == [warmup_steps(reference.config.train, total_steps=len(steps))]
    saves = [(event["event"], event["step"]) for event in events if event["event"] in ("save_begin", "save_durable")]
    assert {("save_durable", 0), ("save_durable", len(steps))} <= set(saves)
    assert len([name for name, _ in saves if name == "save_begin"]) == len([name for name, _ in saves if name == "save_durable"])
    for step, record in steps.items():
        scheduled = lr_at(reference.config.train, step=step, total_steps=len(steps), lr_scale=1.0)
        assert record["lr"] == scheduled


def test_max_steps_ends_the_run_and_nothing_beyond_it_is_computed(root: Path, reference: TinyRun) -> None:
    run = trained_run(root, *OVERRIDES, "train.max_steps=5")
    steps = live_steps(run.paths)
    assert list(steps) == list(range(5))
    assert read_state(run.paths.checkpoint(5)).total_steps == 5
    finish = log_lines(run.paths)[-1]
    assert finish["event"] == "finish"
    assert finish["details"]["queues"]["ready"]["puts"] == 10


def test_a_checkpoint_of_another_configuration_is_refused_with_the_difference(root: Path, reference: TinyRun) -> None:
    run = trained_run(root, *OVERRIDES, "train.max_steps=2")
    changed = rewrite_config(run, overrides=["train.lr=0.5"])
    assert end_of(start_trainer(changed)) == EXIT_USER_ERROR
    told = read_exit(run.paths, segment=1)
    assert told is not None
    assert told.error == "CheckpointError"
    assert "configuration: checkpoint" in told.what
