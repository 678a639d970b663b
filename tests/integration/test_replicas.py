"""Several replicas: real ranks on gloo train as one does, decide together, die together, and resume exactly."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dflash.checkpoint import list_checkpoints, read_state
from dflash.config import dump_config, parse_config
from dflash.data.plan import load_plan
from dflash.data.pointer import read_data_pointer
from dflash.errors import EXIT_INTERRUPTED, EXIT_NONFINITE, NonFiniteLimitError, RunStateError
from dflash.train.changes import accept_changes
from dflash.train.outcome import error_of, read_exit
from dflash.train.runs import prepare_run
from tests.support.same_training import assert_close_steps, assert_same_training, new_run, trained_by_ranks, trained_run
from tests.support.tiny_run import TinyRun, rewrite_config
from tests.support.trainer_process import KillAt, end_of, live_steps, log_lines, start_ranks, train_ranks_to_end, wait_until_logged

COMMON = ("train.epochs=6", "train.lr=0.003", "checkpoint.interval_steps=3")
TWO = (*COMMON, "cluster.replicas=2", "train.accumulation_steps=2")
ONE = (*COMMON, "train.accumulation_steps=4")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replicas")


@pytest.fixture(scope="module")
def two(root: Path) -> TinyRun:
    return trained_by_ranks(root, *TWO)


def assert_close(found: TinyRun, wanted: TinyRun, *, tolerance: float) -> None:
    fields = ("ce", "objective", "grad_norm", "accuracy", "accepted_length", "coverage_frac", "lr")
    assert_close_steps(found, wanted, fields=fields, tolerance=tolerance)
    ours, theirs = live_steps(found.paths), live_steps(wanted.paths)
    for step, record in ours.items():
        batches, others = record["micro_batches"], theirs[step]["micro_batches"]
        assert [item["batch_id"] for item in batches] == [item["batch_id"] for item in others]
        assert [item["n_tokens"] for item in batches] == [item["n_tokens"] for item in others]


def test_two_replicas_train_as_one_with_the_same_global_batch(root: Path, two: TinyRun) -> None:
    one = trained_run(root, *ONE)
    assert len(live_steps(one.paths)) > 15
    assert_close(two, one, tolerance=1e-6)


@pytest.mark.full
def test_three_replicas_without_an_equal_share_of_the_last_step_train_as_one(root: Path) -> None:
    three = new_run(root, *COMMON, "train.epochs=5", "cluster.replicas=3", "train.accumulation_steps=1")
    one = trained_run(root, *COMMON, "train.epochs=5", "train.accumulation_steps=3")
    last = live_steps(one.paths)[max(live_steps(one.paths))]
    assert len(last["micro_batches"]) < 3, "the last step shall leave a rank without a batch"
    train_ranks_to_end(three)
    assert_close(three, one, tolerance=1e-6)


def test_the_log_names_every_ranks_batches_and_waits_and_is_written_once(two: TinyRun) -> None:
    steps = live_steps(two.paths)
    assert [line["step"] for line in log_lines(two.paths) if line["kind"] == "step"] == list(range(len(steps)))
    consumed: list[int] = []
    for record in steps.values():
        batches = record["micro_batches"]
        assert [item["batch_id"] for item in batches] == sorted(item["batch_id"] for item in batches)
        assert len(record["rank_wait_s"]) == len(record["target_depths"]) == 2
        assert record["wait_time_s"] == max(record["rank_wait_s"])
        per_rank = [sum(item["rank"] == rank for item in batches) for rank in (0, 1)]
        assert max(per_rank) <= 2 and abs(per_rank[0] - per_rank[1]) <= 1
        consumed += [item["batch_id"] for item in batches]
    assert consumed == list(range(len(consumed)))
    start = log_lines(two.paths)[0]
    assert start["event"] == "start"
    assert 0 < start["details"]["rank_wait_expected_frac"] < 0.5
    finish = log_lines(two.paths)[-1]
    assert finish["event"] == "finish"
    assert [word["batches"] for word in finish["details"]["replica_times"]] == [
        sum(item["rank"] == rank for record in steps.values() for item in record["micro_batches"]) for rank in (0, 1)
    ]
    assert 0 < finish["details"]["stages"]["drafter"]["busy_frac"] <= 1
    assert "CPU" in finish["details"]["advice"]


@pytest.mark.parametrize(("rank", "operation"), [pytest.param(0, "manifest", marks=pytest.mark.full), (0, "rename")])
def test_a_killed_rank_ends_the_others_and_the_resumed_run_is_exact(root: Path, two: TinyRun, rank: int, operation: str) -> None:
    run = new_run(root, *TWO)
    processes = start_ranks(run, kill_at=KillAt(operation, 3), kill_rank=rank)
    codes = [end_of(process) for process in processes]
    assert codes[rank] == -signal.SIGKILL
    assert codes[1 - rank] not in (0, -signal.SIGKILL), "the other rank must notice by itself"
    assert read_exit(run.paths, segment=0) is None, "a lost rank is a crash, which the supervisor may mend"
    train_ranks_to_end(run)
    assert_same_training(run, two)


def test_a_rank_killed_between_steps_ends_the_others_and_the_resumed_run_is_exact(root: Path, two: TinyRun) -> None:
    run = new_run(root, *TWO)
    processes = start_ranks(run)
    wait_until_logged(run, 7, process=processes[0])
    os.kill(processes[1].pid or 0, signal.SIGKILL)
    assert end_of(processes[1]) == -signal.SIGKILL
    assert end_of(processes[0]) not in (0, -signal.SIGKILL)
    train_ranks_to_end(run)
    assert_same_training(run, two)


def test_a_stop_of_one_rank_stops_all_after_the_same_step_with_the_state_saved(root: Path, two: TinyRun) -> None:
    run = new_run(root, *TWO)
    processes = start_ranks(run)
    wait_until_logged(run, 4, process=processes[0])
    os.kill(processes[1].pid or 0, signal.SIGTERM)
    assert [end_of(process) for process in processes] == [EXIT_INTERRUPTED] * 2
    stopped = next(line["step"] for line in log_lines(run.paths) if line.get("event") == "stop_requested")
    assert max(list_checkpoints(run.paths.checkpoints_dir)) == stopped == max(live_steps(run.paths)) + 1
    train_ranks_to_end(run)
    assert_same_training(run, two)


def test_another_number_of_targets_gives_the_same_training(root: Path, two: TinyRun) -> None:
    run = new_run(root, *TWO)
    for process in start_ranks(run, kill_at=KillAt("manifest", 3)):
        assert end_of(process) != 0
    changed = rewrite_config(run, overrides=["cluster.targets_per_replica=2", "train.queues.feature_bytes=1"])
    train_ranks_to_end(changed)
    assert_same_training(changed, two)
    assert {len(record["target_depths"]) for record in live_steps(run.paths).values()} == {2, 4}


def test_another_number_of_replicas_is_refused_with_the_difference(two: TinyRun) -> None:
    before: dict[str, Any] = two.config.model_dump()
    cluster = two.config.cluster.model_copy(update={"replicas": 4})
    pointer = read_data_pointer(two.paths)
    with pytest.raises(RunStateError, match=r"cluster.replicas: 2 -> 4"):
        prepare_run(
            two.config.model_copy(update={"cluster": cluster}),
            two.paths,
            location=pointer.location,
            fingerprint=pointer.fingerprint,
        )
    assert two.config.model_dump() == before


@pytest.mark.parametrize("replicas", [1, pytest.param(3, marks=pytest.mark.full)])
def test_a_run_goes_on_with_other_replicas_once_that_is_accepted_and_consumes_every_batch_once(root: Path, replicas: int) -> None:
    run = new_run(root, *TWO)
    for process in start_ranks(run, kill_at=KillAt("manifest", 3)):
        assert end_of(process) != 0
    changed = parse_config(dump_config(run.config), origin="test", overrides=[f"cluster.replicas={replicas}"])
    assert accept_changes(changed, run.paths) == (f"cluster.replicas: 2 -> {replicas}",)
    train_ranks_to_end(TinyRun(config=changed, paths=run.paths, data_dir=run.data_dir))
    steps = live_steps(run.paths)
    batches = [item for record in steps.values() for item in record["micro_batches"]]
    assert [item["batch_id"] for item in batches] == list(range(len(batches)))
    assert len(load_plan(run.paths.plan_dir)) == len(batches), "what was left of the plan went to the new ranks, all of it"
    resumed = max(line["step"] for line in log_lines(run.paths) if line.get("event") == "resume")
    ranks = [{item["rank"] for item in record["micro_batches"]} for step, record in steps.items() if step >= resumed]
    assert ranks[0] == set(range(replicas))
    assert read_state(run.paths.checkpoint(len(steps))).total_steps == len(steps)
    config = [line["details"] for line in log_lines(run.paths) if line.get("event") == "config"][-1]
    assert config["total_steps"] == len(steps)
    assert [change["differences"] for change in config["accepted_changes"]] == [[f"cluster.replicas: 2 -> {replicas}"]]


def test_one_ranks_non_finite_loss_is_skipped_by_all_and_ends_all_at_the_limit(root: Path) -> None:
    # A learning rate that no run survives: the losses overflow on whatever rank comes first.
    run = new_run(root, *TWO, "train.lr=1e30", "train.warmup_frac=0.0", "train.clip_norm=1e30")
    assert [end_of(process) for process in start_ranks(run)] == [EXIT_NONFINITE] * 2
    told = read_exit(run.paths, segment=0)
    assert told is not None
    assert isinstance(error_of(told), NonFiniteLimitError)
    skipped = [record for record in live_steps(run.paths).values() if record["skipped"]]
    assert len(skipped) == run.config.train.max_nonfinite_in_row
    assert all(math.isfinite(item["accepted_sum"]) for record in skipped for item in record["micro_batches"])
    assert len(max((record["micro_batches"] for record in skipped), key=len)) == 4


def test_the_last_state_counts_the_steps_of_all_ranks(two: TinyRun) -> None:
    steps = len(live_steps(two.paths))
    state = read_state(two.paths.checkpoint(steps))
    assert (state.step, state.total_steps) == (steps, steps)


@pytest.mark.full
def test_a_rank_that_stalls_is_given_up_after_the_timeout(root: Path) -> None:
    run = new_run(root, *TWO, "train.epochs=2000", "cluster.collective_timeout_s=15")
    processes = start_ranks(run)
    wait_until_logged(run, 3, process=processes[0])
    os.kill(processes[1].pid or 0, signal.SIGSTOP)
    try:
        assert end_of(processes[0]) not in (0, -signal.SIGKILL)
    finally:
        os.kill(processes[1].pid or 0, signal.SIGKILL)
    assert end_of(processes[1]) == -signal.SIGKILL
    assert read_exit(run.paths, segment=0) is None, "a crash, which the supervisor may mend"
