"""One stretch of training in one rank: from a state to the end of the plan, a stop, or an error.

Invariant: whatever ends it, every thread has ended and every log line is on disk before the function returns or raises.
"""

from __future__ import annotations

import dataclasses
import logging
import platform
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from dflash.checkpoint import CheckpointWriter, RunIdentity, WriterHooks, load_checkpoint, read_ledger
from dflash.data.consumption import positions_to_consume, run_joins
from dflash.data.reader import read_batches
from dflash.model.drafter import Drafter
from dflash.records import RunPaths, TrainerState
from dflash.rollback import overlay_in_force, skips_in_force
from dflash.train.changes import accepted_since, read_changes
from dflash.train.feature_cache import FeatureCache, open_feature_cache
from dflash.train.features import FeatureMaker, make_maker, states_width, target_threads
from dflash.train.group import Group
from dflash.train.inputs import Inputs, check_resumable, identity_of, initial_state, replanned
from dflash.train.models import Models
from dflash.train.optimizer import restore
from dflash.train.planted import faults_of
from dflash.train.replica import FeatureSupply
from dflash.train.run_log import RunLog
from dflash.train.schedule import waiting_frac
from dflash.train.sharding import CalledOthers, GatheringSaver, JoiningSaver, whole
from dflash.train.step import Stepper
from dflash.train.trainer import Machinery, Saver, Silent, StepLog, Trainer, costs_of, own_positions, step_groups
from dflash.train.warm_start import warm_start

logger = logging.getLogger(__name__)

_FORESEEN_STEPS = 500
_MUCH_WAITING_FRAC = 0.02

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
    faults = faults_of(inputs.config, inputs.paths, segment=segment)
    state = _set_state(inputs, models, identity, segment=segment, resume_step=resume_step)
    faults.restored(models.drafter, step=resume_step)
    positions = _positions_left(inputs, state)
    mine = (own for step in step_groups(inputs.config, state, positions) for own in own_positions(inputs.plan, step, group=group))
    supply = FeatureSupply(
        read_batches((inputs.plan[p] for p in mine), inputs.store, pad_id=_PAD_ID, reader=inputs.config.data.reader),
        makers=[maker.make for maker in _makers(inputs, models)],
        threads=target_threads(models.device),
        queues=inputs.config.train.queues,
    )
    with ExitStack() as cleanup:
        log: StepLog = Silent()
        checkpoints: Saver = JoiningSaver((models.weights, models.moments), group) if inputs.config.cluster.shard else Silent()
        if group.rank == 0:
            written = _open_log(inputs, segment=segment, on_defect=supply.pipeline.fail)
            cleanup.callback(written.close)
            others = CalledOthers(group) if inputs.config.cluster.shard else None
            hooks = WriterHooks(
                before_snapshot=_nothing if others is None else others.call,
                whole=whole,
                before_commit=written.sync,
                on_event=written.event,
                on_defect=supply.pipeline.fail,
                on_operation=faults.operation(on_operation),
            )
            writer = _writer(inputs, models, identity, hooks)
            cleanup.callback(writer.close)
            log, checkpoints = faults.log(written), writer if others is None else GatheringSaver(writer, others)
        log.event("start" if resume_step is None else "resume", state.step, _start_details(inputs, state))
        log.event("config", state.step, _config_details(inputs, models, identity, state))
        machinery = Machinery(
            plan=inputs.plan,
            group=group,
            supply=supply,
            stepper=faults.stepper(_stepper(inputs, models, group), models.drafter, step=state.step),
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


def _writer(inputs: Inputs, models: Models, identity: RunIdentity, hooks: WriterHooks) -> CheckpointWriter:
    return CheckpointWriter(
        inputs.paths.checkpoints_dir,
        identity=identity,
        drafter=models.weights,
        optimizer=models.moments,
        rule=inputs.config.checkpoint,
        hooks=hooks,
    )


def _nothing() -> None:
    """No other rank is needed for a snapshot."""


def _set_state(inputs: Inputs, models: Models, identity: RunIdentity, *, segment: int, resume_step: int | None) -> TrainerState:
    fresh = initial_state(inputs, segment=segment)
    if resume_step is None:
        _first_weights(inputs, models, mask_token_id=identity.mask_token_id)
        return fresh
    loaded = load_checkpoint(inputs.paths.checkpoint(resume_step))
    changes = accepted_since(inputs.paths, saved_sha256=loaded.state.config_sha256, now_sha256=fresh.config_sha256)
    check_resumable(loaded, fresh=fresh, identity=identity, accepted=bool(changes))
    restore(models.weights, loaded.drafter, what="drafter")
    restore(models.moments, loaded.optimizer, what="optimizer")
    state = _with_rollbacks(dataclasses.replace(loaded.state, segment=segment), inputs.paths)
    return replanned(state, inputs) if changes else state


def _with_rollbacks(state: TrainerState, paths: RunPaths) -> TrainerState:
    """The state with what the run's rollbacks left behind: batches to skip, and the learning rate's overlay."""
    ledger = read_ledger(paths.ledger)
    skipped = set(state.skipped_positions)
    skipped.update(position for first, end in skips_in_force(ledger) for position in range(first, end))
    return dataclasses.replace(state, skipped_positions=tuple(sorted(skipped)), overlay=overlay_in_force(ledger))


def _first_weights(inputs: Inputs, models: Models, *, mask_token_id: int) -> None:
    folder, info, drafter = inputs.config.train.init_from, models.targets[0].info, models.drafter
    if inputs.config.cluster.shard:  # made whole in host memory, then cut
        drafter = Drafter(inputs.config.drafter, target_hidden_size=info.hidden_size)
    if folder is None:
        drafter.init_weights(inputs.config.run.seed)
    else:
        warm_start(drafter, Path(folder), mask_token_id=mask_token_id, info=info)
    if drafter is not models.drafter:
        restore(models.weights, dict(drafter.named_parameters()), what="drafter")


def _positions_left(inputs: Inputs, state: TrainerState) -> Sequence[int]:
    """Plan positions of the steps that are left: nothing is read or computed beyond the last one."""
    left = positions_to_consume(len(inputs.plan), start=state.plan_position, skipped=state.skipped_positions)
    return left[: (state.total_steps - state.step) * inputs.config.micro_batches_per_step]


def _makers(inputs: Inputs, models: Models) -> list[FeatureMaker]:
    """One a target."""
    cache = _feature_cache(inputs, models)
    makers = [
        make_maker(
            target=target,
            target_index=index,
            config=inputs.config,
            mask_token_id=inputs.store.manifest.mask_token_id,
            drafter_device=models.device,
            dtype=models.compute_dtype,
        )
        for index, target in enumerate(models.targets)
    ]
    return [dataclasses.replace(maker, cache=cache) for maker in makers]


def _feature_cache(inputs: Inputs, models: Models) -> FeatureCache | None:
    """The cache of this data set and target, if the configuration wants one."""
    config, target = inputs.config, models.targets[0]
    max_bytes = int(config.train.feature_cache_gib * 2**30)
    if not max_bytes:
        return None
    return open_feature_cache(
        inputs.paths.root.parent,
        origin={
            "data_fingerprint": inputs.store.manifest.fingerprint,
            "target_fingerprint": target.info.fingerprint,
            "target_dtype": str(target.head_weight.dtype),
            "target_layer_ids": target.target_layer_ids,
            "device": target.device.type,
        },
        lengths=inputs.store.lengths,
        width=states_width(config, target),
        dtype=models.compute_dtype,
        max_bytes=max_bytes,
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
    details: dict[str, Any] = {"plan_position": state.plan_position, "total_steps": state.total_steps, "overlay": overlay}
    if inputs.config.cluster.replicas > 1:
        details["rank_wait_expected_frac"] = _expected_waiting(inputs, state)
    joins = run_joins(inputs.plan, state.skipped_positions)
    return details | ({"bucket_run_joins": [dataclasses.asdict(join) for join in joins]} if joins else {})


def _expected_waiting(inputs: Inputs, state: TrainerState) -> float:
    """Share of their time that the ranks will wait for each other because their batches are not equally dear."""
    ranks = inputs.config.cluster.replicas
    steps = islice(step_groups(inputs.config, state, _positions_left(inputs, state)), _FORESEEN_STEPS)
    waiting = waiting_frac((costs_of(inputs.plan, positions) for positions in steps), ranks=ranks)
    if waiting > _MUCH_WAITING_FRAC:
        logger.warning(
            "the ranks will wait %.1f %% of their time for each other: a plan with plan.equal_cost_neighbours=%d (a new run), or "
            "more train.accumulation_steps, would mend that",
            100 * waiting,
            ranks,
        )
    return round(waiting, 4)


def _config_details(inputs: Inputs, models: Models, identity: RunIdentity, state: TrainerState) -> dict[str, Any]:
    return {
        "config_sha256": state.config_sha256,
        "plan_sha256": state.plan_sha256,
        "seed": state.seed,
        "total_steps": state.total_steps,
        "accepted_changes": [dataclasses.asdict(change) for change in read_changes(inputs.paths)],
        "accumulation_steps": inputs.config.train.accumulation_steps,
        "replicas": inputs.config.cluster.replicas,
        "shard": inputs.config.cluster.shard,
        "nodes": inputs.config.cluster.nodes,
        "targets": len(models.targets),
        "parameters": sum(tensor.numel() for tensor in models.weights.values()),
        "compute_dtype": str(models.compute_dtype).removeprefix("torch."),
        "device": str(models.device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        **dataclasses.asdict(identity),
    }
