"""The supervisor with real torchrun processes: it finishes, survives kills, obeys requests, and leaves no orphan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dflash.checkpoint import LATEST, LATEST_CLEAN, clean_steps, list_checkpoints, read_pointer
from dflash.errors import (
    EXIT_INTERRUPTED,
    EXIT_NONFINITE,
    DataError,
    HaltedError,
    InterruptedRunError,
    NonFiniteLimitError,
    RunStateError,
    TrainerCrashedError,
)
from dflash.records import ControlRequest, RunPaths, to_json
from dflash.train.outcome import error_of, read_exit
from dflash.train.processes import recorded_processes
from dflash.train.progress import read_progress
from dflash.train.restarts import StallWatch
from dflash.train.runs import run_is_live
from dflash.train.supervisor import TrainOutcome, supervise
from tests.support.same_training import assert_same_training
from tests.support.tiny_run import TinyRun, build_tiny_run
from tests.support.trainer_process import end_of, live_steps, log_lines, start_trainer, train_to_end

SUPERVISOR = """
import sys
from pathlib import Path
from dflash.config import load_config
from dflash.errors import DflashError
from dflash.records import RunPaths
from dflash.train.supervisor import supervise
paths = RunPaths(Path(sys.argv[1]))
try:
    supervise(load_config(paths.config), paths, on_tick=lambda: None, critical_spans=lambda: ())
except DflashError as error:
    sys.exit(error.exit_code)
"""

LONG = ("train.epochs=36", "checkpoint.interval_steps=10", "train.accumulation_steps=2")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("supervised")


@pytest.fixture(scope="module")
def reference(root: Path) -> TinyRun:
    run = build_tiny_run(root, overrides=LONG)
    train_to_end(run)
    return run


def watch(run: TinyRun, on_tick: Callable[[], None]) -> TrainOutcome:
    return supervise(run.config, run.paths, on_tick=on_tick, critical_spans=lambda: ())


def nothing() -> None:
    """Do nothing on a tick."""


def last_step(paths: RunPaths) -> int:
    return max((line["step"] for line in log_lines(paths) if line["kind"] == "step"), default=-1)


def pid_of(paths: RunPaths, role: str) -> int:
    return next(process.pid for process in recorded_processes(paths) if process.role == role)


def test_a_supervised_run_finishes_and_leaves_a_complete_folder(root: Path, reference: TinyRun) -> None:
    run = build_tiny_run(root, overrides=LONG)
    seen: list[int] = []
    listening: list[object] = []

    def on_tick() -> None:
        assert run_is_live(run.paths)
        seen.append(read_progress(run.paths).step)
        for process in recorded_processes(run.paths):
            try:
                connections = psutil.Process(process.pid).net_connections()
            except psutil.NoSuchProcess:
                continue
            listening.extend(item for item in connections if item.status == psutil.CONN_LISTEN)

    outcome = watch(run, on_tick)
    assert_same_training(run, reference)
    live = live_steps(run.paths)
    assert (outcome.steps, outcome.checkpoint_step, outcome.restarts) == (len(live), len(live), 0)
    assert outcome.train_time_s == pytest.approx(sum(record["step_time_s"] for record in live.values()))
    waited = sum(record["wait_time_s"] for record in live.values())
    assert outcome.wait_frac == pytest.approx(waited / outcome.train_time_s)
    assert seen == sorted(seen)
    assert not listening, "nothing may listen on a network interface"
    assert read_pointer(run.paths.checkpoints_dir, LATEST) == outcome.steps
    assert read_pointer(run.paths.checkpoints_dir, LATEST_CLEAN) == outcome.steps
    assert {0, outcome.steps} <= set(clean_steps(run.paths.ledger))
    assert {0, outcome.steps} <= set(list_checkpoints(run.paths.checkpoints_dir))
    assert recorded_processes(run.paths) == []
    assert not run_is_live(run.paths)
    assert not list(run.paths.control_dir.glob("rendezvous*"))

    log = run.paths.log.read_bytes()
    assert watch(run, lambda: pytest.fail("a finished run starts no trainer")) == outcome
    assert run.paths.log.read_bytes() == log


def test_killing_the_rank_and_then_torchrun_ends_with_the_same_weights(root: Path, reference: TinyRun) -> None:
    run = build_tiny_run(root, overrides=LONG)
    victims = [("trainer", 15), ("torchrun", 40)]
    launchers: set[int] = set()

    def on_tick() -> None:
        torchrun = next((process.pid for process in recorded_processes(run.paths) if process.role == "torchrun"), None)
        # The torchrun of a killed rank still takes a while to end: each victim belongs to a launch of its own.
        if victims and last_step(run.paths) >= victims[0][1] and torchrun is not None and torchrun not in launchers:
            launchers.add(torchrun)
            role, _ = victims.pop(0)
            os.kill(pid_of(run.paths, role), signal.SIGKILL)

    outcome = watch(run, on_tick)
    assert outcome.restarts == 2 and not victims
    assert_same_training(run, reference)
    assert recorded_processes(run.paths) == []


def test_a_trainer_that_stalls_is_ended_and_started_again(root: Path, reference: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = build_tiny_run(root, overrides=LONG)
    stopped: list[int] = []

    def on_tick() -> None:
        if not stopped and last_step(run.paths) >= 12:
            stopped.append(pid_of(run.paths, "trainer"))
            os.kill(stopped[0], signal.SIGSTOP)  # every thread of it, its targets too, stands still

    def stalls(_watch: StallWatch, _end: int, *, now_s: float) -> bool:
        """What the clock would say after half an hour."""
        told.append(len(stopped))
        return bool(stopped) and 1 not in told[:-1]

    told: list[int] = []
    monkeypatch.setattr("dflash.train.child.STOP_GRACE_S", 1.0)
    monkeypatch.setattr(StallWatch, "stalls", stalls)
    outcome = watch(run, on_tick)
    assert stopped
    assert outcome.restarts == 1
    assert_same_training(run, reference)
    assert recorded_processes(run.paths) == []


def test_a_second_supervisor_is_refused_and_the_first_goes_on(root: Path, reference: TinyRun) -> None:
    run = build_tiny_run(root, overrides=LONG)
    refused: list[str] = []

    def on_tick() -> None:
        if not refused and last_step(run.paths) >= 3:
            with pytest.raises(RunStateError, match="is being trained by another supervisor") as raised:
                watch(run, lambda: pytest.fail("the second one trains"))
            refused.append(raised.value.what)

    assert watch(run, on_tick).restarts == 0
    assert f"pid {os.getpid()}" in refused[0]
    assert_same_training(run, reference)


def test_a_trainer_that_dies_too_often_is_given_up_with_the_end_of_its_output(root: Path) -> None:
    run = build_tiny_run(root, overrides=[*LONG, "train.max_restarts=0"])
    killed: list[int] = []

    def on_tick() -> None:
        if not killed and any(process.role == "trainer" for process in recorded_processes(run.paths)):
            killed.append(pid_of(run.paths, "trainer"))
            os.kill(killed[0], signal.SIGKILL)

    with pytest.raises(TrainerCrashedError, match="and 0 restarts did not help") as raised:
        watch(run, on_tick)
    assert "Signal 9 (SIGKILL)" in raised.value.what
    assert recorded_processes(run.paths) == []


def put_request(paths: RunPaths, key: str, action: str) -> None:
    request = ControlRequest(key=key, action=action, reason="a test", requested_at="2026-01-01", requested_by="test")  # type: ignore[arg-type]
    paths.requests_dir.mkdir(parents=True, exist_ok=True)
    (paths.requests_dir / f"{key}.json").write_text(to_json(request))


def test_a_halt_saves_the_state_acknowledges_and_raises_and_the_run_can_go_on(root: Path, reference: TinyRun) -> None:
    run = build_tiny_run(root, overrides=LONG)

    def on_tick() -> None:
        if last_step(run.paths) >= 11 and not list(run.paths.requests_dir.iterdir()):
            put_request(run.paths, "k1", "halt")

    with pytest.raises(HaltedError, match="halted by test: a test"):
        watch(run, on_tick)
    stopped = max(live_steps(run.paths)) + 1
    assert max(list_checkpoints(run.paths.checkpoints_dir)) == stopped
    assert "stopped" in (run.paths.requests_dir / "k1.ack.json").read_text()
    assert recorded_processes(run.paths) == []

    put_request(run.paths, "k2", "stop")
    log = run.paths.log.read_bytes()
    with pytest.raises(InterruptedRunError, match="stopped by test"):
        watch(run, lambda: pytest.fail("a stop that waits starts no trainer"))
    assert run.paths.log.read_bytes() == log
    train_to_end(run)
    assert_same_training(run, reference)


def test_an_error_of_the_trainer_is_raised_as_it_is_and_never_restarted(root: Path) -> None:
    run = build_tiny_run(root, overrides=LONG)
    plan = run.paths.plan_dir / "epoch-0000.rows.npy"
    plan.write_bytes(plan.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"epoch-0000\.rows\.npy"):
        watch(run, nothing)
    assert run.paths.trainer_output.read_text().count("--- segment") == 1
    assert not run.paths.log.exists()
    assert list_checkpoints(run.paths.checkpoints_dir) == []


def test_an_error_of_the_tick_ends_the_trainer_too(root: Path) -> None:
    run = build_tiny_run(root, overrides=LONG)

    def on_tick() -> None:
        if last_step(run.paths) >= 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        watch(run, on_tick)
    assert recorded_processes(run.paths) == []
    assert not run_is_live(run.paths)


def start_supervisor(run: TinyRun) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(run.paths.root)])


def wait_for_step(run: TinyRun, supervisor: subprocess.Popen[bytes], step: int) -> None:
    while last_step(run.paths) < step:
        try:
            supervisor.wait(timeout=0.01)
        except subprocess.TimeoutExpired:
            continue
        pytest.fail(f"the supervisor ended with {supervisor.returncode}")


def test_sigterm_and_sigkill_of_the_supervisor_lose_nothing_and_leave_no_orphan(root: Path, reference: TinyRun) -> None:
    run = build_tiny_run(root, overrides=LONG)
    supervisor = start_supervisor(run)
    wait_for_step(run, supervisor, 5)
    supervisor.terminate()
    assert supervisor.wait(timeout=60) == EXIT_INTERRUPTED
    assert recorded_processes(run.paths) == []
    stopped = max(live_steps(run.paths)) + 1
    assert max(list_checkpoints(run.paths.checkpoints_dir)) == stopped

    supervisor = start_supervisor(run)
    wait_for_step(run, supervisor, stopped + 3)
    trainer = psutil.Process(pid_of(run.paths, "trainer"))
    supervisor.kill()
    supervisor.wait()
    assert psutil.wait_procs([trainer], timeout=60)[1] == [], "the trainer outlives its killed supervisor"
    train_to_end(run)
    assert_same_training(run, reference)


def test_updates_that_stay_non_finite_end_the_process_with_their_own_code(root: Path) -> None:
    run = build_tiny_run(
        root, overrides=["train.lr=1e30", "train.warmup_frac=0", "train.clip_norm=1e30", "train.max_nonfinite_in_row=2"]
    )
    assert end_of(start_trainer(run)) == EXIT_NONFINITE
    told = read_exit(run.paths, segment=0)
    assert told is not None and isinstance(error_of(told), NonFiniteLimitError)
    skips = [line for line in log_lines(run.paths) if line.get("event") == "skip"]
    records = live_steps(run.paths)
    assert [line["details"]["in_row"] for line in skips][-2:] == [1, 2]
    for line in skips:
        record = records[line["step"]]
        assert record["skipped"] and record["nonfinite"] == line["details"]["nonfinite"]
        assert [item["batch_id"] for item in record["micro_batches"]] == line["details"]["batch_ids"]
    assert max(records) == skips[-1]["step"], "every record is on disk, the last one too"


def test_the_trainer_imports_neither_prefect_nor_mlflow() -> None:
    code = "import sys, dflash.train.worker; print(sorted({'prefect', 'mlflow', 'boto3'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_launcher_and_the_progress_reader_do_not_pay_for_torch() -> None:
    code = "import sys, dflash.train.launch, dflash.train.progress; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
