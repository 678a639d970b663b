"""Restarts after crashes and the lock on the machine's devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash.config import ClusterConfig, TrainConfig
from dflash.errors import DeviceError
from dflash.train.device_lock import LOCK_DIR_VARIABLE, device_names, hold_devices
from dflash.train.restarts import RestartBudget, StallWatch

RULE = TrainConfig(max_restarts=3, restart_wait_s=2, restart_max_wait_s=5, restart_heal_steps=100)


def test_waits_double_up_to_their_limit_and_the_budget_ends() -> None:
    budget = RestartBudget(RULE)
    assert (budget.wait_s, budget.spent) == (0, False)
    waits = []
    for _ in range(4):
        assert not budget.spent
        budget.crashed(end=7)
        waits.append(budget.wait_s)
    assert waits == [2, 4, 5, 5]
    assert budget.spent
    assert budget.total == 4


def test_progress_clears_the_count_and_its_lack_does_not() -> None:
    budget = RestartBudget(RULE)
    for end in (100, 199, 298):
        budget.crashed(end=end)
    assert budget.in_row == 3
    budget.crashed(end=398)
    assert (budget.in_row, budget.total, budget.wait_s) == (1, 4, 2)
    budget.crashed(end=350)  # a rollback lies between: the log is shorter now
    assert budget.in_row == 2


def test_a_thousand_crashes_far_apart_never_end_a_run_and_none_overflows() -> None:
    budget = RestartBudget(TrainConfig(max_restarts=0, restart_wait_s=1, restart_max_wait_s=9, restart_heal_steps=10))
    budget.crashed(end=0)
    assert budget.spent
    patient = RestartBudget(TrainConfig(max_restarts=10**6, restart_wait_s=1, restart_max_wait_s=9, restart_heal_steps=10))
    for _ in range(5000):
        patient.crashed(end=0)
    assert patient.wait_s == 9
    far_apart = RestartBudget(TrainConfig(max_restarts=1, restart_heal_steps=10))
    for number in range(1000):
        far_apart.crashed(end=10 * (number + 1))
        assert not far_apart.spent


def test_only_a_log_that_stands_still_for_too_long_is_a_stall() -> None:
    watch = StallWatch(10, now_s=100)
    assert not watch.stalls(0, now_s=105)
    assert not watch.stalls(0, now_s=115)
    assert watch.stalls(0, now_s=115.5)
    assert not watch.stalls(1, now_s=116)
    assert not watch.stalls(0, now_s=126), "a rollback shortens the log and is progress too"
    assert not watch.stalls(0, now_s=136)
    assert watch.stalls(0, now_s=136.1)


GPUS = ClusterConfig(device="cuda", targets_per_replica=2)

HOLD = """
import sys
from dflash.config import ClusterConfig
from dflash.train.device_lock import hold_devices
with hold_devices(ClusterConfig(device="cuda", targets_per_replica=2), run="runs/other-001"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_devices_are_named_as_the_ranks_will_see_them() -> None:
    assert device_names(ClusterConfig(device="cpu"), {}) == []
    assert device_names(GPUS, {}) == ["0", "1", "2"]
    assert device_names(GPUS.model_copy(update={"share_device": True}), {}) == ["0"]
    assert device_names(GPUS, {"CUDA_VISIBLE_DEVICES": "5, GPU-a,7,6"}) == ["5", "GPU-a", "7"]


def test_a_device_belongs_to_one_training_until_its_process_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOCK_DIR_VARIABLE, str(tmp_path / "locks"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(DeviceError, match=rf"GPU 0 is being used by another training \(pid {other.pid}, runs/other-001\)"):
            hold_devices(GPUS, run="x").__enter__()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,2")
        with pytest.raises(DeviceError, match="GPU 2 is being used"):
            hold_devices(GPUS, run="x").__enter__()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5")
        with hold_devices(GPUS, run="x"), hold_devices(ClusterConfig(device="cpu"), run="y"):
            assert (tmp_path / "locks" / "4.lock").read_text() == f"pid {os.getpid()}, x\n"
        other.kill()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with hold_devices(GPUS, run="x"):
        pass
