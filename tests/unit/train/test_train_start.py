"""What happens before the first step: identities, devices, command lines, and what a supervisor refuses."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from dflash.checkpoint import LoadedCheckpoint, RunIdentity
from dflash.config import ClusterConfig, Config, dump_config, parse_config
from dflash.errors import (
    CheckpointError,
    ConfigError,
    DeviceError,
    DflashError,
    HaltedError,
    InterruptedRunError,
    RunStateError,
    TargetError,
)
from dflash.records import ControlRequest, to_json
from dflash.train.group import Alone
from dflash.train.inputs import Inputs, check_resumable, identity_of, initial_state, open_inputs
from dflash.train.launch import launch_command, main
from dflash.train.models import load_models, replica_devices
from dflash.train.outcome import error_of, read_exit
from dflash.train.pipeline import Pipeline
from dflash.train.processes import STOP_GRACE_S
from dflash.train.runs import hold_run, training_hash
from dflash.train.segment import _start_details
from dflash.train.supervisor import TrainOutcome, supervise
from dflash.train.trainer import Machinery, Silent, Trainer
from tests.support.checkpoints import save_at
from tests.support.tiny_run import TinyRun, build_tiny_run, rewrite_config, tiny_target
from tests.support.trainer_process import end_of, start_trainer


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("start")


@pytest.fixture
def run(root: Path) -> TinyRun:
    return build_tiny_run(root)


@pytest.fixture
def inputs(run: TinyRun) -> Inputs:
    return open_inputs(run.config, run.paths)


def changed(config: Config, *overrides: str) -> Config:
    return parse_config(dump_config(config), origin="test", overrides=overrides)


def test_targets_sit_on_the_first_devices_of_their_replica_and_the_drafter_on_the_last(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert replica_devices(changed(run.config, "cluster.targets_per_replica=3")) == [torch.device("cpu")] * 4
    gpus = changed(run.config, "cluster.device=cuda", "cluster.targets_per_replica=2")
    for rank, first in (("0", 0), ("1", 3)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert [str(device) for device in replica_devices(gpus)] == [f"cuda:{first + index}" for index in range(3)]
        shared = changed(gpus, "cluster.share_device=true")
        assert [str(device) for device in replica_devices(shared)] == [f"cuda:{first // 3}"] * 3


def test_on_a_cpu_all_target_workers_share_one_loaded_target(run: TinyRun) -> None:
    models = load_models(changed(run.config, "cluster.targets_per_replica=3"))
    assert len(models.targets) == 3
    assert len({id(target) for target in models.targets}) == 1
    assert models.compute_dtype is torch.float32
    assert load_models(changed(run.config, "train.compute_dtype=bfloat16")).compute_dtype is torch.bfloat16
    assert {name for name, _ in models.drafter.named_parameters()} == set(models.weights)


def test_the_first_state_counts_the_plan_and_knows_what_decides_the_numbers(run: TinyRun, inputs: Inputs) -> None:
    state = initial_state(inputs, segment=4)
    assert (state.step, state.plan_position, state.segment, state.overlay) == (0, 0, 4, None)
    assert state.total_steps == len(inputs.plan)
    assert state.config_sha256 == training_hash(run.config)
    halved = dataclasses.replace(inputs, config=changed(run.config, "train.accumulation_steps=2"))
    assert initial_state(halved, segment=0).total_steps == (len(inputs.plan) + 1) // 2


def test_runs_that_skipping_joins_are_declared_when_a_segment_starts(run: TinyRun, inputs: Inputs) -> None:
    state = initial_state(inputs, segment=1)
    assert "bucket_run_joins" not in _start_details(inputs, state)
    most = max({inputs.plan.bucket_of(position) for position in range(len(inputs.plan))})
    others = tuple(position for position in range(len(inputs.plan)) if inputs.plan.bucket_of(position) != most)
    details = _start_details(inputs, dataclasses.replace(state, skipped_positions=others))
    [join] = details["bucket_run_joins"]
    assert join["bucket"] == most
    assert join["batches"] == len(inputs.plan) - len(others)


def test_answers_of_another_target_are_refused(inputs: Inputs) -> None:
    mine = inputs.store.manifest.target_fingerprint
    assert identity_of(inputs, target_fingerprint=mine).mask_token_id == inputs.store.manifest.mask_token_id
    with pytest.raises(TargetError, match=rf"written by target {mine[:16]}, not by ffff"):
        identity_of(inputs, target_fingerprint="f" * 64)


def test_a_checkpoint_that_does_not_belong_to_the_run_shows_every_difference(inputs: Inputs) -> None:
    identity = identity_of(inputs, target_fingerprint=inputs.store.manifest.target_fingerprint)
    fresh = initial_state(inputs, segment=0)
    manifest = save_at(inputs.paths.checkpoints_dir, 5)
    loaded = LoadedCheckpoint(
        manifest=dataclasses.replace(
            manifest,
            data_fingerprint=identity.data_fingerprint,
            target_fingerprint=identity.target_fingerprint,
            mask_token_id=identity.mask_token_id,
        ),
        state=dataclasses.replace(fresh, step=5),
        drafter={},
        optimizer={},
    )
    check_resumable(loaded, fresh=fresh, identity=identity, accepted=False)
    reconfigured = dataclasses.replace(fresh, config_sha256="c")
    with pytest.raises(CheckpointError, match=r"configuration: checkpoint .*, run c"):
        check_resumable(loaded, fresh=reconfigured, identity=identity, accepted=False)
    check_resumable(loaded, fresh=reconfigured, identity=identity, accepted=True)
    other = RunIdentity(data_fingerprint="d", target_fingerprint=identity.target_fingerprint, mask_token_id=9)
    with pytest.raises(CheckpointError) as raised:
        check_resumable(loaded, fresh=dataclasses.replace(fresh, plan_sha256="p", seed=1), identity=other, accepted=True)
    for wanted in ("plan: checkpoint", "seed: checkpoint 5, run 1", "data set: checkpoint", "mask token id: checkpoint 47, run 9"):
        assert wanted in raised.value.what
    assert "target" not in raised.value.what


def test_the_command_line_starts_torchrun_without_a_network_rendezvous(tmp_path: Path) -> None:
    cluster = ClusterConfig(replicas=2)
    command = launch_command(tmp_path, tmp_path / "meet", cluster=cluster, node=0, segment=3, resume_step=7)
    assert command[:4] == [sys.executable, "-m", "dflash.train.launch", str(os.getpid())]
    assert "--nproc-per-node=2" in command
    assert "--rdzv-conf=store_type=file" in command
    assert command[-6:] == ["--run-dir", str(tmp_path), "--segment", "3", "--resume-step", "7"]
    fresh = launch_command(tmp_path, tmp_path / "meet", cluster=cluster, node=0, segment=0, resume_step=None)
    assert "--resume-step" not in fresh
    assert STOP_GRACE_S < 30, "Prefect and torchrun kill after 30 s"


def test_the_launcher_refuses_nonsense_and_a_parent_that_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["x", "-"]) == main(["5"]) == 2
    assert "usage" in capsys.readouterr().err
    code = f"import sys; from dflash.train.launch import main; sys.exit(main(['{os.getpid() + 1}', '-', '--help']))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 3


def outcome_of(run: TinyRun) -> TrainOutcome:
    return supervise(
        run.config, run.paths, on_tick=lambda: pytest.fail("no trainer may start"), critical_spans=lambda: pytest.fail("no check")
    )


def test_two_supervisors_on_one_run_are_refused(run: TinyRun) -> None:
    with hold_run(run.paths), pytest.raises(RunStateError, match="another supervisor"):
        outcome_of(run)
    assert not run.paths.trainer_output.exists()


def test_devices_that_are_missing_are_refused_before_anything_is_touched(run: TinyRun) -> None:
    with pytest.raises(DeviceError, match="6"):
        outcome_of(rewrite_config(run, overrides=["cluster.device=cuda", "cluster.targets_per_replica=5"]))
    assert not run.paths.lock.exists()


@pytest.mark.parametrize(("action", "error"), [("halt", HaltedError), ("stop", InterruptedRunError)])
def test_a_request_that_waits_is_obeyed_before_a_trainer_starts(run: TinyRun, action: str, error: type[DflashError]) -> None:
    request = ControlRequest(key="k", action=action, reason="because", requested_at="now", requested_by="me")  # type: ignore[arg-type]
    (run.paths.requests_dir / "k.json").write_text(to_json(request))
    with pytest.raises(error, match="by me: because"):
        outcome_of(run)
    assert (run.paths.requests_dir / "k.ack.json").exists()
    assert not run.paths.trainer_output.exists()


def test_a_supervisor_works_off_the_main_thread_where_signals_cannot_be_taken(run: TinyRun) -> None:
    request = ControlRequest(key="k", action="stop", reason="because", requested_at="now", requested_by="me")
    (run.paths.requests_dir / "k.json").write_text(to_json(request))
    errors: list[BaseException] = []

    def body() -> None:
        with pytest.raises(InterruptedRunError) as raised:
            outcome_of(run)
        errors.append(raised.value)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert len(errors) == 1


def test_leftovers_of_killed_writers_are_cleared_before_a_start(run: TinyRun) -> None:
    for name in ("step-3.tmp", "step-2.deleted", "step-1.old"):
        (run.paths.checkpoints_dir / name).mkdir()
    request = ControlRequest(key="k", action="stop", reason="because", requested_at="now", requested_by="me")
    (run.paths.requests_dir / "k.json").write_text(to_json(request))
    with pytest.raises(InterruptedRunError):
        outcome_of(run)
    assert [path.name for path in run.paths.checkpoints_dir.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("break_it", "kind"),
    [
        (lambda run, _: run.paths.config.write_text("nonsense: 1"), ConfigError),
        (lambda run, _: run.paths.data_pointer.unlink(), RunStateError),
        (lambda _, root: tiny_target(root / "target", seed=9), TargetError),
    ],
    ids=["config", "data pointer", "target"],
)
def test_a_trainer_that_cannot_start_records_its_error_and_leaves_no_log(
    tmp_path: Path, break_it: object, kind: type[DflashError]
) -> None:
    run = build_tiny_run(tmp_path)
    break_it(run, tmp_path)  # type: ignore[operator]
    assert end_of(start_trainer(run)) == kind.exit_code
    told = read_exit(run.paths, segment=0)
    assert told is not None
    assert type(error_of(told)) is kind
    assert not run.paths.log.exists()


class WrongOrder:
    """A supply that hands out a batch that is not the one the plan has."""

    depths = (0, 0)
    finished = (0,)

    def __init__(self, batch: object) -> None:
        self._batch = batch
        self.pipeline = Pipeline([])

    def next(self) -> tuple[object, float]:
        return self._batch, 0.0


def test_a_batch_out_of_plan_order_is_a_defect_and_never_trained_on(inputs: Inputs) -> None:
    class Planned:
        planned = inputs.plan[1]

    machinery = Machinery(
        plan=inputs.plan,
        group=Alone(),
        supply=WrongOrder(Planned()),  # type: ignore[arg-type]
        stepper=None,  # type: ignore[arg-type]
        log=Silent(),
        checkpoints=Silent(),
        stop=threading.Event(),
    )
    trainer = Trainer(inputs.config, state=initial_state(inputs, segment=0), machinery=machinery)
    with pytest.raises(RuntimeError, match="batch 1 arrived where the plan has 0"):
        trainer.run([0, 1, 2])
