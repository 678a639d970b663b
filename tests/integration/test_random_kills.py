"""SIGKILL at random points, again and again: between steps and inside saves; the end is that of a run left alone, to the bit.

Five kills normally; `DFLASH_FULL=1` (`make test-full`) kills sixty times. The points come from the seed.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.support.same_training import assert_same_training, new_run, trained_run
from tests.support.tiny_run import TinyRun
from tests.support.trainer_process import KillAt, end_of, live_steps, log_lines, start_trainer, train_to_end, wait_until

OVERRIDES = ("train.accumulation_steps=2", "train.epochs=14", "checkpoint.interval_steps=3")
OPERATIONS = ("prepare", "drafter", "optimizer", "state", "manifest", "clear", "rename", "sync folder", "pointer")
KILLS_PER_RUN = 5
SEEDS = range(12 if os.environ.get("DFLASH_FULL") else 1)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kills")


@pytest.fixture(scope="module")
def reference(root: Path) -> TinyRun:
    return trained_run(root, *OVERRIDES)


def last_step(run: TinyRun) -> int:
    return max((line["step"] for line in log_lines(run.paths) if line["kind"] == "step"), default=-1)


def kill_somewhere(run: TinyRun, draw: random.Random) -> bool:
    """Start a trainer and kill it at a drawn point; whether that came before its end."""
    if draw.random() < 0.5:
        return end_of(start_trainer(run, kill_at=KillAt(draw.choice(OPERATIONS), draw.randint(1, 3)))) == -signal.SIGKILL
    process = start_trainer(run)
    wanted = last_step(run) + draw.randint(1, 8)
    wait_until(lambda: last_step(run) >= wanted or process.exitcode is not None, process=process)
    if process.pid is not None and process.exitcode is None:
        os.kill(process.pid, signal.SIGKILL)
    return end_of(process) == -signal.SIGKILL


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_killed_at_random_points_ends_like_one_left_alone(root: Path, reference: TinyRun, seed: int) -> None:
    draw = random.Random(seed)
    run = new_run(root, *OVERRIDES)
    kills = sum(kill_somewhere(run, draw) for _ in range(KILLS_PER_RUN))
    assert kills >= KILLS_PER_RUN - 1, "the run is long enough to be killed that often"
    train_to_end(run)
    assert_same_training(run, reference)
    assert list(live_steps(run.paths)) == list(range(len(live_steps(reference.paths)))), "no record is lost and none is there twice"
