"""The whole loop with nothing but real parts: bad data, a trainer, the health check that sees it, the supervisor that acts.

The target's embedding of one token is NaN and three batches in a row of the plan contain that token. Their updates are not finite;
the health check decides to go back to a clean checkpoint and to leave these batches out, and the run ends without them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash.checkpoint import read_ledger, read_state
from dflash.errors import HaltedError
from dflash.records import RollbackEntry, RunPaths
from dflash.stages import reopen_run, train_stage
from dflash.train.processes import recorded_processes
from tests.support.poisoned_run import build_poisoned_run
from tests.support.trainer_process import live_steps, log_lines

SAMPLES = 400
FIRST_BAD, BAD_BATCHES = 70, 3
BAD = range(FIRST_BAD, FIRST_BAD + BAD_BATCHES)


def rollbacks_of(paths: RunPaths) -> list[RollbackEntry]:
    return [line for line in read_ledger(paths.ledger) if isinstance(line, RollbackEntry)]


@pytest.mark.parametrize(
    "limit", [3, pytest.param(50, marks=pytest.mark.full)], ids=["the trainer gives up", "the trainer goes on skipping"]
)
def test_a_run_that_meets_bad_data_goes_back_leaves_it_out_and_finishes(tmp_path: Path, limit: int) -> None:
    paths = build_poisoned_run(tmp_path, samples=SAMPLES, bad=BAD, settings=(f"train.max_nonfinite_in_row={limit}",))
    outcome = train_stage(reopen_run(paths.root), on_progress=lambda _progress: None)
    lines = rollbacks_of(paths)
    assert [line.phase for line in lines] == ["begin", "end"]
    plan = lines[0].plan
    bad = set(BAD)
    assert plan.rung == 1
    assert bad <= {position for first, end in plan.skip for position in range(first, end)}
    assert lines[1].target_step is not None
    assert lines[1].target_step <= FIRST_BAD
    assert (outcome.rollbacks, outcome.restarts) == (1, 0)

    live = live_steps(paths)
    assert list(live) == list(range(outcome.steps))
    assert not any(record["skipped"] for record in live.values()), "no live record is damaged"
    consumed = [item["batch_id"] for record in live.values() for item in record["micro_batches"]]
    assert not bad & set(consumed)
    assert len(consumed) == len(set(consumed)), "nothing is trained on twice"
    state = read_state(paths.checkpoint(outcome.steps))
    assert bad <= set(state.skipped_positions)
    events = [line["event"] for line in log_lines(paths) if line["kind"] == "event"]
    assert events.count("rollback_begin") == events.count("rollback_end") == 1
    assert sum(line.get("event") == "skip" for line in log_lines(paths)) >= BAD_BATCHES
    acknowledged = list(paths.requests_dir.glob("*.ack.json"))
    assert len(acknowledged) == 1
    assert recorded_processes(paths) == []


def test_without_rollbacks_the_same_run_is_halted(tmp_path: Path) -> None:
    paths = build_poisoned_run(tmp_path, samples=SAMPLES, bad=BAD, settings=("rollback.enabled=false",))
    with pytest.raises(HaltedError, match="switched off"):
        train_stage(reopen_run(paths.root), on_progress=lambda _progress: None)
    assert [line.phase for line in rollbacks_of(paths)] == ["halt"]
    assert recorded_processes(paths) == []
