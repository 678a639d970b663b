"""Log records of a step: sums and counts as they were, non-finite numbers as null with their names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dflash.records import MicroBatchRecord, StepRecord
from dflash.train.features import FeatureBatch
from dflash.train.step import Sums, Update


@dataclass(frozen=True, slots=True)
class StepContext:
    """What the loop knows of a step besides the update itself.

    Attributes:
        plan_position: micro-batches of the plan consumed when the step is done.
        depths: batches in the ready queue and in the reorder window when the step began.
        finished: batches finished by each target worker.

    """

    segment: int
    step: int
    wall_time_s: float
    mono_time_s: float
    lr: float
    warmup_factor: float
    plan_position: int
    step_time_s: float
    wait_time_s: float
    depths: tuple[int, int]
    finished: tuple[int, ...]


def step_record(context: StepContext, update: Update, batches: Sequence[FeatureBatch]) -> StepRecord:
    """The log line of one optimizer step."""
    micro = tuple(micro_batch_record(batch, sums) for batch, sums in zip(batches, update.sums, strict=True))
    correct, valid = sum(sum(item.correct) for item in micro), sum(sum(item.valid) for item in micro)
    blocks = sum(item.n_blocks for item in micro)
    tokens = sum(item.length_sum_tokens for item in micro)
    supervised = sum(item.supervised_tokens for item in micro)
    padded = sum(item.padded_length_tokens * item.n_seqs for item in micro)
    return StepRecord(
        segment=context.segment,
        step=context.step,
        wall_time_s=context.wall_time_s,
        mono_time_s=context.mono_time_s,
        ce=finite_or_none(update.ce),
        objective=finite_or_none(update.objective),
        accuracy=correct / valid if valid else 0.0,
        accepted_length=sum(item.accepted_sum for item in micro) / blocks if blocks else 0.0,
        coverage_frac=sum(item.covered_tokens for item in micro) / supervised if supervised else 0.0,
        grad_norm=finite_or_none(update.grad_norm),
        clip_coef=finite_or_none(update.clip_coef),
        lr=context.lr,
        warmup_factor=context.warmup_factor,
        skipped=bool(update.nonfinite),
        nonfinite=update.nonfinite,
        micro_batches=micro,
        plan_position=context.plan_position,
        padding_frac=1.0 - tokens / padded,
        step_time_s=context.step_time_s,
        wait_time_s=context.wait_time_s,
        tokens_per_s=tokens / context.step_time_s,
        ready_depth=context.depths[0],
        feature_depth=context.depths[1],
        target_depths=context.finished,
    )


def micro_batch_record(batch: FeatureBatch, sums: Sums) -> MicroBatchRecord:
    """What one micro-batch contributed."""
    planned = batch.planned
    return MicroBatchRecord(
        batch_id=planned.position,
        bucket=planned.bucket,
        epoch=planned.epoch,
        rows=planned.rows,
        padded_length_tokens=planned.padded_length_tokens,
        length_min_tokens=min(batch.lengths),
        length_max_tokens=max(batch.lengths),
        length_sum_tokens=sum(batch.lengths),
        n_seqs=len(batch.lengths),
        n_tokens=sums.n_tokens,
        n_blocks=sums.n_blocks,
        supervised_tokens=batch.supervised_tokens,
        covered_tokens=batch.covered_tokens,
        ce_sum=finite_or_none(sums.ce_sum),
        objective_sum=finite_or_none(sums.objective_sum),
        objective_weight=finite_or_none(sums.objective_weight),
        accepted_sum=sums.accepted_sum,
        correct=sums.correct,
        valid=sums.valid,
    )


def finite_or_none(value: float) -> float | None:
    """JSON has neither NaN nor infinities."""
    return value if math.isfinite(value) else None
