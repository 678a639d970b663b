"""The health stage: judging changes nothing; acting hands one request to a live supervisor, once."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dflash.config import PlanConfig, dump_config, parse_config
from dflash.data.plan import build_plan
from dflash.errors import RunStateError
from dflash.records import ControlRequest, RunPaths, from_json
from dflash.stages import health_stage, load_report
from dflash.stages.health import critical_spans
from dflash.train.requests import pending_requests
from tests.support.log_simulator import Record, nonfinite, simulate_run, write_log
from tests.support.plans import write_plan

pytestmark = pytest.mark.usefixtures("without_pictures")
STEPS = 260
FIRST_BAD = 200

HOLD = (
    "import sys; from pathlib import Path; from dflash.records import RunPaths; from dflash.train.runs import hold_run\n"
    "with hold_run(RunPaths(Path(sys.argv[1]))): print('held', flush=True); sys.stdin.read()"
)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run folder with a configuration and no log yet."""
    run = RunPaths(tmp_path / "demo-001")
    run.checkpoints_dir.mkdir(parents=True)
    text = f"run: {{root: {tmp_path}}}\ntarget: {{mask_token: x}}\ndata: {{num_conversations: 3}}\ntrain: {{schedule: constant}}"
    run.config.write_text(dump_config(parse_config(text, origin="test")))
    samples = SimpleNamespace(lengths=np.full(3, 16), buckets=np.zeros(3, dtype=np.int64))
    write_plan(build_plan(samples, data_fingerprint="d", plan=PlanConfig(), seed=0, epochs=1), run.plan_dir)
    return run


def healthy_log() -> list[Record]:
    return simulate_run(seed=3, steps=STEPS, lr=lambda _step: 6e-3)


def destroyed_log() -> list[Record]:
    """From FIRST_BAD on nothing is finite any more and every update is skipped."""

    return nonfinite(healthy_log(), steps=range(FIRST_BAD, STEPS), skipped=True)


@contextmanager
def supervised(paths: RunPaths) -> Iterator[None]:
    """Another process holds the run, as its supervisor does."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(paths.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    try:
        yield
    finally:
        holder.communicate()


def test_a_decision_becomes_one_request_to_the_live_supervisor(paths: RunPaths) -> None:
    write_log(paths.log, destroyed_log())
    with supervised(paths):
        report = health_stage(paths.root, act=True, ended=None)
        assert report.verdict == "unhealthy"
        assert report.decision is not None
        assert report.decision.onset_step == FIRST_BAD
        (file,) = paths.requests_dir.iterdir()
        before = file.read_bytes()
        health_stage(paths.root, act=True, ended=None)
        assert [path.read_bytes() for path in paths.requests_dir.iterdir()] == [before], "the same evidence asks once"
    request = from_json(ControlRequest, before, origin=str(file))
    assert (request.key, request.action) == (report.decision.key, "halt")
    assert [pending.key for pending in pending_requests(paths)] == [report.decision.key]


def test_judging_alone_asks_for_nothing(paths: RunPaths) -> None:
    write_log(paths.log, destroyed_log())
    with supervised(paths):
        assert health_stage(paths.root, act=False, ended=None).decision is not None
    assert not paths.requests_dir.exists()


def test_a_dead_run_is_judged_but_has_nobody_to_ask(paths: RunPaths) -> None:
    write_log(paths.log, destroyed_log())
    assert health_stage(paths.root, act=True, ended=None).decision is not None
    assert not paths.requests_dir.exists()


def test_a_healthy_run_asks_for_nothing(paths: RunPaths) -> None:
    write_log(paths.log, healthy_log())
    with supervised(paths):
        report = health_stage(paths.root, act=True, ended=False)
    assert report.decision is None
    assert not paths.requests_dir.exists()
    assert critical_spans(paths) == ()


def test_the_spans_date_the_damage(paths: RunPaths) -> None:
    write_log(paths.log, destroyed_log())
    spans = critical_spans(paths)
    assert min(onset for onset, _ in spans) == FIRST_BAD
    assert max(end for _, end in spans) == STEPS - 1


@pytest.mark.draws
def test_checks_at_the_same_time_do_not_disturb_each_other(paths: RunPaths) -> None:
    one_bucket = simulate_run(seed=3, steps=STEPS, lr=lambda _step: 6e-3, order=[1] * STEPS)  # half the pictures
    write_log(paths.log, nonfinite(one_bucket, steps=range(FIRST_BAD, STEPS), skipped=True))
    verdicts: list[str] = []
    threads = [
        threading.Thread(target=lambda: verdicts.append(health_stage(paths.root, act=False, ended=True).verdict)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == ["unhealthy"] * 4
    assert load_report(paths).records == STEPS
    assert json.loads((paths.health_dir / "state.json").read_text())


def test_a_run_that_was_never_checked_says_how(paths: RunPaths) -> None:
    with pytest.raises(RunStateError, match="no health report"):
        load_report(paths)
