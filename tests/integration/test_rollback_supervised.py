"""Rollbacks with real trainers: the run goes back, leaves the named batches out, and ends; nothing else changes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash.checkpoint import clean_steps, list_checkpoints, read_ledger, read_manifest, read_state
from dflash.errors import HaltedError
from dflash.records import ControlRequest, LrOverlay, RollbackEntry, RollbackPlan, RunPaths, to_json
from dflash.train.processes import recorded_processes
from dflash.train.schedule import lr_at
from dflash.train.supervisor import TrainOutcome, supervise
from tests.support.same_training import assert_same_training
from tests.support.tiny_run import TinyRun, build_tiny_run
from tests.support.trainer_process import live_steps, log_lines, train_to_end

# A fast trainer makes many checkpoints between two looks of a supervisor: all are kept, so that the wanted one is still there.
LONG = ("train.epochs=36", "checkpoint.interval_steps=10", "train.accumulation_steps=2", "checkpoint.keep_clean=50")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rollback")


@pytest.fixture(scope="module")
def reference(root: Path) -> TinyRun:
    run = build_tiny_run(root, overrides=LONG)
    train_to_end(run)
    return run


def watch(run: TinyRun, on_tick: Callable[[], None]) -> TrainOutcome:
    return supervise(run.config, run.paths, on_tick=on_tick, critical_spans=lambda: ())


def ask(
    paths: RunPaths, *, action: str, target: int | None, skip: tuple[tuple[int, int], ...] = (), overlay: LrOverlay | None = None
) -> None:
    last = max(live_steps(paths))
    segment = max(line["segment"] for line in log_lines(paths))
    plan = RollbackPlan(
        # The second rung: the first one goes back to whatever is clean by the time that it is carried out.
        key=f"segment-{segment}", action=action, rung=2, segment=segment, onset_step=last, alarm_step=last, region_step=last,  # type: ignore[arg-type]
        target_step=target, skip=skip, overlay=overlay, reason="a test",
    )  # fmt: skip
    request = ControlRequest(plan.key, plan.action, plan.reason, "2026-01-01", "test", plan=plan)
    paths.requests_dir.mkdir(parents=True, exist_ok=True)
    (paths.requests_dir / f"{plan.key}.json").write_text(to_json(request))


class AskOnce:
    """Asks for one rollback as soon as the checkpoint of a step is clean and training has gone on past it."""

    def __init__(self, run: TinyRun, **wanted: object) -> None:
        self.run, self.wanted, self.asked = run, wanted, False

    def __call__(self) -> None:
        steps = live_steps(self.run.paths)
        target = self.wanted["target"]
        assert isinstance(target, int)
        if not self.asked and steps and max(steps) > target + 15 and target in clean_steps(self.run.paths.ledger):
            ask(self.run.paths, action="rollback", **self.wanted)  # type: ignore[arg-type]
            self.asked = True


def test_going_back_without_a_skip_ends_with_the_same_weights(root: Path, reference: TinyRun) -> None:
    run = build_tiny_run(root, overrides=LONG)
    asker = AskOnce(run, target=10)
    outcome = watch(run, asker)
    assert asker.asked
    assert (outcome.rollbacks, outcome.restarts) == (1, 0)
    assert_same_training(run, reference)
    segments = {record["segment"] for record in live_steps(run.paths).values()}
    assert segments == {0, 1}
    assert (run.paths.requests_dir / "segment-0.ack.json").is_file()
    assert recorded_processes(run.paths) == []


def test_skipped_batches_are_never_consumed_and_the_rate_is_warmed_up_again(root: Path) -> None:
    run = build_tiny_run(root, overrides=LONG)
    overlay = LrOverlay(from_step=10, rewarm_from=0.1, rewarm_steps=8, cap=0.5)
    outcome = watch(run, AskOnce(run, target=10, skip=((24, 31),), overlay=overlay))
    live = live_steps(run.paths)
    consumed = [item["batch_id"] for _, record in sorted(live.items()) for item in record["micro_batches"]]
    batches = read_manifest(run.paths.checkpoint(outcome.steps)).plan_position
    assert consumed == [position for position in range(batches) if not 24 <= position < 31]
    state = read_state(run.paths.checkpoint(outcome.steps))
    assert (state.skipped_positions, state.overlay) == (tuple(range(24, 31)), overlay)
    assert outcome.steps < state.total_steps, "fewer batches are fewer steps; the schedule stays as it was laid out"
    for step, factor in ((9, 1.0), (10, 0.1), (12, 0.325), (14, 0.5), (outcome.steps - 1, 0.5)):
        plain = lr_at(run.config.train, step=step, total_steps=state.total_steps, lr_scale=1.0)
        assert live[step]["lr"] == pytest.approx(plain * factor)
    # The finished run is seen as finished.
    assert watch(run, lambda: pytest.fail("a finished run starts no trainer")).steps == outcome.steps


@pytest.mark.full
def test_a_trainer_killed_after_the_rollback_still_leaves_the_batches_out(root: Path) -> None:
    run = build_tiny_run(root, overrides=LONG)
    asker = AskOnce(run, target=10, skip=((24, 31),))
    killed: list[int] = []

    def on_tick() -> None:
        asker()
        trainers = [process.pid for process in recorded_processes(run.paths) if process.role == "trainer"]
        segments = {record["segment"] for record in live_steps(run.paths).values()}
        if not killed and 1 in segments and max(live_steps(run.paths)) > 25 and trainers:
            killed.append(trainers[0])
            os.kill(trainers[0], signal.SIGKILL)

    outcome = watch(run, on_tick)
    assert killed
    assert (outcome.rollbacks, outcome.restarts) == (1, 1)
    consumed = [item["batch_id"] for record in live_steps(run.paths).values() for item in record["micro_batches"]]
    assert not set(consumed) & set(range(24, 31))
    assert len(consumed) == len(set(consumed))


def test_a_halt_of_the_health_check_is_final(root: Path) -> None:
    run = build_tiny_run(root, overrides=LONG)

    def on_tick() -> None:
        if live_steps(run.paths) and not list(run.paths.requests_dir.iterdir()):
            ask(run.paths, action="halt", target=None)

    with pytest.raises(HaltedError, match="halted by the health check: a test"):
        watch(run, on_tick)
    checkpoints = list_checkpoints(run.paths.checkpoints_dir)
    with pytest.raises(HaltedError):
        watch(run, lambda: pytest.fail("a halted run starts no trainer"))
    assert list_checkpoints(run.paths.checkpoints_dir) == checkpoints
    phases = [line.phase for line in read_ledger(run.paths.ledger) if isinstance(line, RollbackEntry)]
    assert phases == ["halt"]
