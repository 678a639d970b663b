"""Checkpoints copied to S3 beside a real training: they arrive, an outage costs nothing, and a lost disk is restored from them."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from dflash.checkpoint.remote import list_copies, upload_checkpoint
from dflash.errors import CheckpointError, InterruptedRunError, RunStateError
from dflash.stages.restore import restore_stage
from dflash.storage import Store, open_store
from dflash.train.processes import recorded_processes
from dflash.train.supervisor import TrainOutcome, supervise
from tests.support.checkpoints import ignore, save_at
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.s3_server import BUCKET, point_to, s3_server
from tests.support.tiny_run import TinyRun, build_tiny_run
from tests.support.trainer_process import final_hashes, live_steps, numbers_of, train_to_end

LONG = ("train.epochs=36", "checkpoint.interval_steps=10", "train.accumulation_steps=2")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mirror")


@pytest.fixture(scope="module")
def reference(root: Path) -> TinyRun:
    run = build_tiny_run(root, overrides=LONG)
    train_to_end(run)
    return run


def mirrored_run(root: Path, *settings: str) -> tuple[TinyRun, Store]:
    location = f"s3://{BUCKET}/{uuid4().hex}"
    run = build_tiny_run(root, overrides=[*LONG, f"checkpoint.store={location}", *settings])
    return run, open_store(f"{location}/{run.paths.root.name}")


def watch(run: TinyRun) -> TrainOutcome:
    return supervise(run.config, run.paths, on_tick=lambda: None, critical_spans=lambda: ())


def test_the_last_checkpoint_is_in_the_store_when_training_ends_and_old_copies_are_not(
    root: Path, reference: TinyRun, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_to(monkeypatch, server)
    run, store = mirrored_run(root, "checkpoint.keep_remote=1")
    outcome = watch(run)
    copies = list_copies(store)
    assert max(copies).step == outcome.steps
    assert len(copies) <= 2
    told = json.loads((run.paths.control_dir / "mirror.json").read_text())
    assert (told["copies"], told["error"]) == ([[copy.step, copy.segment] for copy in copies], None)
    assert numbers_of(run.paths) == numbers_of(reference.paths)


def test_a_lost_disk_is_restored_from_the_store_and_training_ends_the_same(
    root: Path, reference: TinyRun, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_to(monkeypatch, server)
    run, store = mirrored_run(root)
    stopped: list[int] = []

    def on_tick() -> None:
        # A copy that is neither the first state nor the last one.
        if not stopped and any(copy.step > 0 for copy in list_copies(store)):
            stopped.append(1)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(InterruptedRunError):
        supervise(run.config, run.paths, on_tick=on_tick, critical_spans=lambda: ())
    shutil.rmtree(run.paths.checkpoints_dir)
    run.paths.log.unlink()
    newest = max(list_copies(store))
    assert restore_stage(run.paths.root).step == newest.step
    with pytest.raises(RunStateError, match="is there already"):
        restore_stage(run.paths.root)
    outcome = watch(run)
    steps = len(live_steps(reference.paths))
    assert outcome.steps == steps
    assert final_hashes(run.paths, steps) == final_hashes(reference.paths, steps)
    assert {record["segment"] for record in live_steps(run.paths).values()} == {newest.segment + 1}
    later = {step: numbers for step, numbers in numbers_of(reference.paths).items() if step >= newest.step}
    assert numbers_of(run.paths) == later


def test_a_damaged_copy_is_passed_over_and_without_a_good_one_restoring_is_refused(root: Path, tmp_path: Path) -> None:
    run = build_tiny_run(root, overrides=[*LONG, f"checkpoint.store={tmp_path}"])
    store = open_store(tmp_path / run.paths.root.name)
    for step in (10, 20):
        save_at(tmp_path / "made", step)
        upload_checkpoint(store, tmp_path / "made" / f"step-{step}", on_object=ignore)
    weights = f"{max(list_copies(store)).prefix}drafter.safetensors"
    store.put(weights, store.read(weights)[:-1] + b"x", only_if_absent=False)
    assert restore_stage(run.paths.root).step == 10
    shutil.rmtree(run.paths.checkpoint(10))
    for copy in list_copies(store):
        store.put(f"{copy.prefix}manifest.json", b"{", only_if_absent=False)
    with pytest.raises(CheckpointError, match="holds no good copy"):
        restore_stage(run.paths.root)
    with pytest.raises(RunStateError, match="copies its checkpoints nowhere"):
        restore_stage(build_tiny_run(root).paths.root)


def test_a_store_that_is_down_costs_the_training_nothing_and_gets_its_copy_later(
    root: Path, reference: TinyRun, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    down = Fault(kind="status", times=10**9, method="PUT", status=403)
    with FaultyProxy(server, faults=[down]) as proxy:
        point_to(monkeypatch, proxy.url)
        run, store = mirrored_run(root, "checkpoint.upload_wait_s=0")
        outcome = watch(run)
        assert outcome.restarts == 0
        assert numbers_of(run.paths) == numbers_of(reference.paths)
        assert list_copies(store) == []
        assert json.loads((run.paths.control_dir / "mirror.json").read_text())["error"]
        assert recorded_processes(run.paths) == []
    point_to(monkeypatch, server)
    later = TinyRun(
        config=run.config.model_copy(update={"checkpoint": run.config.checkpoint.model_copy(update={"upload_wait_s": 60.0})}),
        paths=run.paths,
        data_dir=run.data_dir,
    )
    assert watch(later).steps == outcome.steps
    assert [copy.step for copy in list_copies(store)] == [outcome.steps]
