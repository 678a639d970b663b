"""What a segment starts from: data, plan, state; and that all of it belongs together.

Invariant: everything that a checkpoint, a plan and a data set say about each other is compared before the first step; a
mismatch is one message that shows both values.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dflash.checkpoint import LoadedCheckpoint, RunIdentity
from dflash.config import Config
from dflash.data.consumption import positions_to_consume
from dflash.data.plan import BatchPlan, load_plan
from dflash.data.pointer import read_data_pointer
from dflash.data.reader import SampleStore
from dflash.errors import CheckpointError, RunStateError, TargetError
from dflash.records import RunPaths, TrainerState
from dflash.train.guard import NEW_GUARD
from dflash.train.runs import training_hash
from dflash.train.schedule import count_steps


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run trains on."""

    config: Config
    paths: RunPaths
    plan: BatchPlan
    store: SampleStore


def open_inputs(config: Config, paths: RunPaths) -> Inputs:
    """Open data set and plan, and check that they belong together.

    Raises:
        RunStateError, DataError: missing, damaged or not made for each other.
    """
    pointer = read_data_pointer(paths)
    plan = load_plan(paths.plan_dir)
    if plan.manifest.data_fingerprint != pointer.fingerprint:
        raise RunStateError(
            f"run {paths.root} trains on data set {pointer.fingerprint[:16]}, "
            f"but its plan says {plan.manifest.data_fingerprint[:16]}",
            remedy="start a new run: data set and plan of a run never change",
        )
    store = SampleStore(pointer.location, fingerprint=pointer.fingerprint, reader=config.data.reader)
    return Inputs(config=config, paths=paths, plan=plan, store=store)


def identity_of(inputs: Inputs, *, target_fingerprint: str) -> RunIdentity:
    """What every checkpoint of this run belongs to.

    Raises:
        TargetError: the data set's answers were written by another target.
    """
    manifest = inputs.store.manifest
    if manifest.on_policy and manifest.target_fingerprint != target_fingerprint:
        raise TargetError(
            f"the answers of data set {manifest.fingerprint[:16]} were written by target {manifest.target_fingerprint[:16]}, "
            f"not by {target_fingerprint[:16]}",
            remedy="prepare the data again with this target",
        )
    return RunIdentity(
        data_fingerprint=manifest.fingerprint,
        target_fingerprint=target_fingerprint,
        mask_token_id=manifest.mask_token_id,
    )


def initial_state(inputs: Inputs, *, segment: int) -> TrainerState:
    """State before the first update."""
    train, batches = inputs.config.train, len(inputs.plan)
    return TrainerState(
        step=0,
        plan_position=0,
        segment=segment,
        plan_sha256=inputs.plan.manifest.plan_sha256,
        config_sha256=training_hash(inputs.config),
        seed=inputs.config.run.seed,
        total_steps=count_steps(batches, skipped=(), step_batches=inputs.config.micro_batches_per_step, max_steps=train.max_steps),
        skipped_positions=(),
        overlay=None,
        nonfinite_in_row=0,
        guard=None if train.skip_update_if_grad_over is None else NEW_GUARD,
    )


def check_resumable(loaded: LoadedCheckpoint, *, fresh: TrainerState, identity: RunIdentity, accepted: bool) -> None:
    """Compare a checkpoint with what the run would start from now.

    Args:
        loaded: the checkpoint.
        fresh: state that the run would have before its first update.
        identity: what the run's checkpoints belong to.
        accepted: a changed configuration was accepted; everything else must still be the same.

    Raises:
        CheckpointError: something that decides the numbers differs; the message shows all of it.
    """
    pairs: dict[str, tuple[object, object]] = {
        "plan": (loaded.state.plan_sha256, fresh.plan_sha256),
        "configuration": (loaded.state.config_sha256, fresh.config_sha256),
        "seed": (loaded.state.seed, fresh.seed),
        "data set": (loaded.manifest.data_fingerprint, identity.data_fingerprint),
        "target": (loaded.manifest.target_fingerprint, identity.target_fingerprint),
        "mask token id": (loaded.manifest.mask_token_id, identity.mask_token_id),
    }
    if accepted:
        del pairs["configuration"]
    differences = [f"{name}: checkpoint {saved}, run {now}" for name, (saved, now) in pairs.items() if saved != now]
    if differences:
        raise CheckpointError(
            f"checkpoint step-{loaded.state.step} does not belong to this run:\n  " + "\n  ".join(differences),
            remedy="start a new run for a changed configuration, or undo the change",
        )


def replanned(state: TrainerState, inputs: Inputs) -> TrainerState:
    """A state whose run goes on with an accepted change: what is left of the plan makes as many steps as it now takes.

    Position, weights and moments stay; the schedule is laid out anew for the steps done and the steps left.
    """
    left = len(positions_to_consume(len(inputs.plan), start=state.plan_position, skipped=state.skipped_positions))
    total = state.step + count_steps(left, skipped=(), step_batches=inputs.config.micro_batches_per_step, max_steps=None)
    longest, guarded = inputs.config.train.max_steps, inputs.config.train.skip_update_if_grad_over is not None
    return dataclasses.replace(
        state,
        config_sha256=training_hash(inputs.config),
        total_steps=total if longest is None else max(state.step, min(total, longest)),
        guard=(state.guard or NEW_GUARD) if guarded else None,
    )
