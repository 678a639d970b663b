"""One stretch of training in one rank: from a state to the end of the plan, a stop, or an error.

Invariant: whatever ends it, every thread has ended and every log line is on disk before the function returns or raises.
"""

from __future__ import annotations

import dataclasses
import platform
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from dflash.checkpoint import CheckpointWriter, RunIdentity, WriterHooks, load_checkpoint, read_ledger
from dflash.data.consumption import positions_to_consume, run_joins
from dflash.data.reader import read_batches
from dflash.records import RunPaths, TrainerState
from dflash.rollback import overlay_in_force, skips_in_force
from dflash.train.features import FeatureMaker, make_maker, target_threads
from dflash.train.group import Group
from dflash.train.inputs import Inputs, check_resumable, identity_of, initial_state
from dflash.train.models import Models
from dflash.train.optimizer import restore
from dflash.train.replica import FeatureSupply
from dflash.train.run_log import RunLog
from dflash.train.step import Stepper
from dflash.train.trainer import Machinery, Saver, Silent, StepLog, Trainer, own_positions, step_groups
from dflash.train.warm_start import warm_start

_PAD_ID = 0
"""Padding stands behind causal sequences and is never a label, so any id of the vocabulary will do."""


def run_segment(
    inputs: Inputs,
    models: Models,
    *,
    segment: int,
    resume_step: int | None,
    stop: threading.Event,
    on_operation: Callable[[str], None],
    group: Group,
) -> TrainerState:
    """Train from checkpoint `resume_step` (None: from nothing) to the end.

    Args:
        inputs: data and plan.
        models: loaded models; their weights are set here.
        segment: number of this stretch of the log.
        resume_step: checkpoint to continue from.
        stop: set (by a signal) to save and end after the step in progress.
        on_operation: called before each file operation of a checkpoint.
        group: all ranks; the first one logs and saves.

    Returns:
        The final state.

    Raises:
        CheckpointError: the checkpoint is damaged, belongs to another run, or the last one cannot be written.
        InterruptedRunError, NonFiniteLimitError, BrokenGroupError: see `Trainer.run`.
        BaseException: the error of a stage that failed.
    """
    identity = identity_of(inputs, target_fingerprint=models.targets[0].info.fingerprint)
    state = _set_state(inputs, models, identity, segment=segment, resume_step=resume_step)
    positions = _positions_left(inputs, state)
    mine = (own for step in step_groups(inputs.config, state, positions) for own in own_positions(inputs.plan, step, group=group))
    supply = FeatureSupply(
        read_batches((inputs.plan[p] for p in mine), inputs.store, pad_id=_PAD_ID, reader=inputs.config.data.reader),
        makers=[_maker(inputs, models, index).make for index in range(len(models.targets))],
        threads=target_threads(models.device),
        queues=inputs.config.train.queues,
    )
    with ExitStack() as cleanup:
        log: StepLog = Silent()
        checkpoints: Saver = Silent()
        if group.rank == 0:
            written = _open_log(inputs, segment=segment, on_defect=supply.pipeline.fail)
            cleanup.callback(written.close)
            hooks = WriterHooks(
                before_commit=written.sync, on_event=written.event, on_defect=supply.pipeline.fail, on_operation=on_operation
            )
            writer = CheckpointWriter(
                inputs.paths.checkpoints_dir,
                identity=identity,
                drafter=models.weights,
                optimizer=models.moments,
                rule=inputs.config.checkpoint,
                hooks=hooks,
            )
            cleanup.callback(writer.close)
            log, checkpoints = written, writer
        log.event("start" if resume_step is None else "resume", state.step, _start_details(inputs, state))
        log.event("config", state.step, _config_details(inputs, models, identity))
        machinery = Machinery(
            plan=inputs.plan,
            group=group,
            supply=supply,
            stepper=_stepper(inputs, models, group),
            log=log,
            checkpoints=checkpoints,
            stop=stop,
        )
        cleanup.callback(supply.shut_down)
        supply.start()
        return Trainer(inputs.config, state=state, machinery=machinery).run(positions)


def _open_log(inputs: Inputs, *, segment: int, on_defect: Callable[[BaseException], None]) -> RunLog:
    train = inputs.config.train
    return RunLog(
        inputs.paths.log,
        segment=segment,
        capacity_records=train.queues.log_records,
        heartbeat_s=train.log_heartbeat_s,
        on_defect=on_defect,
    )


def _set_state(inputs: Inputs, models: Models, identity: RunIdentity, *, segment: int, resume_step: int | None) -> TrainerState:
    fresh = initial_state(inputs, segment=segment)
    if resume_step is None:
        _first_weights(inputs, models, mask_token_id=identity.mask_token_id)
        return fresh
    loaded = load_checkpoint(inputs.paths.checkpoint(resume_step))
    check_resumable(loaded, fresh=fresh, identity=identity)
    restore(models.weights, loaded.drafter, what="drafter")
    restore(models.moments, loaded.optimizer, what="optimizer")
    return _with_rollbacks(dataclasses.replace(loaded.state, segment=segment), inputs.paths)


def _with_rollbacks(state: TrainerState, paths: RunPaths) -> TrainerState:
    """The state with what the run's rollbacks left behind: batches to skip, and the learning rate's overlay."""
    ledger = read_ledger(paths.ledger)
    skipped = set(state.skipped_positions)
    skipped.update(position for first, end in skips_in_force(ledger) for position in range(first, end))
    return dataclasses.replace(state, skipped_positions=tuple(sorted(skipped)), overlay=overlay_in_force(ledger))


def _first_weights(inputs: Inputs, models: Models, *, mask_token_id: int) -> None:
    folder = inputs.config.train.init_from
    if folder is None:
        models.drafter.init_weights(inputs.config.run.seed)
    else:
        warm_start(models.drafter, Path(folder), mask_token_id=mask_token_id, info=models.targets[0].info)


def _positions_left(inputs: Inputs, state: TrainerState) -> Sequence[int]:
    """Plan positions of the steps that are left: nothing is read or computed beyond the last one."""
    left = positions_to_consume(len(inputs.plan), start=state.plan_position, skipped=state.skipped_positions)
    return left[: (state.total_steps - state.step) * inputs.config.micro_batches_per_step]


def _maker(inputs: Inputs, models: Models, index: int) -> FeatureMaker:
    return make_maker(
        target=models.targets[index],
        target_index=index,
        config=inputs.config,
        mask_token_id=inputs.store.manifest.mask_token_id,
        drafter_device=models.device,
        dtype=models.compute_dtype,
    )


def _stepper(inputs: Inputs, models: Models, group: Group) -> Stepper:
    return Stepper(
        models.drafter,
        models.optimizer,
        head=models.head(),
        loss=inputs.config.train.loss,
        clip_norm=inputs.config.train.clip_norm,
        autocast_dtype=None if models.compute_dtype is torch.float32 else models.compute_dtype,
        group=group,
    )


def _start_details(inputs: Inputs, state: TrainerState) -> dict[str, Any]:
    overlay = None if state.overlay is None else dataclasses.asdict(state.overlay)
    details = {"plan_position": state.plan_position, "total_steps": state.total_steps, "overlay": overlay}
    joins = run_joins(inputs.plan, state.skipped_positions)
    return details | ({"bucket_run_joins": [dataclasses.asdict(join) for join in joins]} if joins else {})


def _config_details(inputs: Inputs, models: Models, identity: RunIdentity) -> dict[str, Any]:
    fresh = initial_state(inputs, segment=0)
    return {
        "config_sha256": fresh.config_sha256,
        "plan_sha256": fresh.plan_sha256,
        "seed": fresh.seed,
        "total_steps": fresh.total_steps,
        "accumulation_steps": inputs.config.train.accumulation_steps,
        "replicas": inputs.config.cluster.replicas,
        "nodes": inputs.config.cluster.nodes,
        "targets": len(models.targets),
        "parameters": sum(tensor.numel() for tensor in models.weights.values()),
        "compute_dtype": str(models.compute_dtype).removeprefix("torch."),
        "device": str(models.device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        **dataclasses.asdict(identity),
    }
