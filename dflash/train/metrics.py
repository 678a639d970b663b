"""Log records of a step: sums and counts as they were, non-finite numbers as null with their names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from dflash.records import MicroBatchRecord, StepRecord
from dflash.train.features import FeatureBatch
from dflash.train.step import Sums, Update


@dataclass(frozen=True, slots=True)
class StepContext:
    """What the loop knows of a step besides the update itself.

    Attributes:
        plan_position: micro-batches of the plan consumed when the step is done.

    """

    segment: int
    step: int
    wall_time_s: float
    mono_time_s: float
    lr: float
    warmup_factor: float
    plan_position: int
    step_time_s: float


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """What the log tells of a micro-batch besides its losses; the names are those of `MicroBatchRecord`."""

    batch_id: int
    bucket: int
    epoch: int
    rows: tuple[int, ...]
    padded_length_tokens: int
    length_min_tokens: int
    length_max_tokens: int
    length_sum_tokens: int
    n_seqs: int
    supervised_tokens: int
    covered_tokens: int

    @classmethod
    def of(cls, batch: FeatureBatch) -> Self:
        """The facts of a batch."""
        planned = batch.planned
        return cls(
            batch_id=planned.position,
            bucket=planned.bucket,
            epoch=planned.epoch,
            rows=planned.rows,
            padded_length_tokens=planned.padded_length_tokens,
            length_min_tokens=min(batch.lengths),
            length_max_tokens=max(batch.lengths),
            length_sum_tokens=sum(batch.lengths),
            n_seqs=len(batch.lengths),
            supervised_tokens=batch.supervised_tokens,
            covered_tokens=batch.covered_tokens,
        )


_FACTS = tuple(field.name for field in fields(BatchFacts))


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a rank tells the others after each step; a word of its group.

    Attributes:
        batches: that it consumed.
        wait_time_s: that its drafter waited for features.
        depths: batches in its ready queue and in its reorder window when the step began.
        finished: batches finished by each of its target workers.
        stop: it was asked to stop.

    """

    batches: tuple[BatchFacts, ...]
    wait_time_s: float
    depths: tuple[int, int]
    finished: tuple[int, ...]
    stop: bool

    @classmethod
    def from_word(cls, word: dict[str, Any]) -> Self:
        """The report that `dataclasses.asdict` (and JSON) made a word of."""
        batches = tuple(BatchFacts(**(item | {"rows": tuple(item["rows"])})) for item in word["batches"])
        ready, features = word["depths"]
        return cls(
            batches=batches,
            wait_time_s=word["wait_time_s"],
            depths=(ready, features),
            finished=tuple(word["finished"]),
            stop=word["stop"],
        )


def step_record(context: StepContext, update: Update, reports: Sequence[RankReport]) -> StepRecord:
    """The log line of one optimizer step from the reports of all ranks, by rank."""
    ranked = sorted(
        ((facts, rank) for rank, report in enumerate(reports) for facts in report.batches), key=lambda item: item[0].batch_id
    )
    micro = tuple(micro_batch_record(facts, sums, rank=rank) for (facts, rank), sums in zip(ranked, update.sums, strict=True))
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
        skipped=update.skipped,
        nonfinite=update.nonfinite,
        micro_batches=micro,
        plan_position=context.plan_position,
        padding_frac=1.0 - tokens / padded,
        step_time_s=context.step_time_s,
        wait_time_s=max(report.wait_time_s for report in reports),
        tokens_per_s=tokens / context.step_time_s,
        ready_depth=sum(report.depths[0] for report in reports),
        feature_depth=sum(report.depths[1] for report in reports),
        target_depths=tuple(count for report in reports for count in report.finished),
        rank_wait_s=tuple(report.wait_time_s for report in reports),
    )


def micro_batch_record(facts: BatchFacts, sums: Sums, *, rank: int) -> MicroBatchRecord:
    """What one micro-batch contributed."""
    known: dict[str, Any] = {name: getattr(facts, name) for name in _FACTS}
    return MicroBatchRecord(
        **known,
        n_tokens=sums.n_tokens,
        n_blocks=sums.n_blocks,
        ce_sum=finite_or_none(sums.ce_sum),
        objective_sum=finite_or_none(sums.objective_sum),
        objective_weight=finite_or_none(sums.objective_weight),
        accepted_sum=sums.accepted_sum,
        correct=sums.correct,
        valid=sums.valid,
        rank=rank,
    )


def finite_or_none(value: float) -> float | None:
    """JSON has neither NaN nor infinities."""
    return value if math.isfinite(value) else None
