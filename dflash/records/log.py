"""Records of the training log: one JSON object a line, append-only, for exactly one optimizer step each.

Step arithmetic: record s is the update from state s to state s+1; checkpoint `step-N` is the state after
N updates. A record at s is live iff no later segment starts at or before s.
Non-finite numbers are written as null and named in `nonfinite`, because JSON has no NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

LOG_SCHEMA_VERSION: Final = 1

EventName = Literal[
    "config", "start", "resume", "save_begin", "save_staged", "save_durable", "save_failed", "save_skipped", "skip",
    "rollback_begin", "rollback_end", "epoch", "lr_change", "heartbeat", "log_drops", "stop_requested", "finish",
    "acceptance_probe",
]  # fmt: skip

SEGMENT_STARTS: Final = frozenset({"start", "resume", "rollback_end"})
"""Events with which a segment of the log can begin."""


@dataclass(frozen=True, slots=True)
class MicroBatchRecord:
    """What one micro-batch of a step contributed; sums and counts, never means of means.

    Attributes:
        batch_id: position in the plan.
        ce_sum: summed plain cross-entropy over `n_tokens` supervised slots (null if non-finite).
        objective_sum, objective_weight: numerator and denominator of the training objective.
        correct, valid: per slot k = 1..K-1, correct predictions and supervised slots.
        accepted_sum: sum over blocks of the honest block proxy (longest correct prefix).
        n_tokens: supervised slots; n_blocks: kept anchors; n_seqs: sequences.
        covered_tokens: of `supervised_tokens`, those that some block was trained to predict.
        rank: replica that consumed it.
    """

    batch_id: int
    bucket: int
    epoch: int
    rows: tuple[int, ...]
    padded_length_tokens: int
    length_min_tokens: int
    length_max_tokens: int
    length_sum_tokens: int
    n_seqs: int
    n_tokens: int
    n_blocks: int
    supervised_tokens: int
    covered_tokens: int
    ce_sum: float | None
    objective_sum: float | None
    objective_weight: float | None
    accepted_sum: float
    correct: tuple[int, ...]
    valid: tuple[int, ...]
    rank: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        ce: mean plain cross-entropy of the step, the health series (null if non-finite).
        grad_norm: norm before clipping; clip_coef: factor applied (1 = not clipped).
        coverage_frac: share of the supervised tokens that some block was trained to predict.
        skipped: the update was not applied, because something was not finite or its norm was over the guard's limit.
        nonfinite: names of the non-finite quantities.
        micro_batches: of all replicas, in plan order.
        step_time_s: wall time of the step; wait_time_s: of it, the longest time that a replica's drafter waited for features.
        ready_depth, feature_depth: batches in the two queues (of all replicas) when the step began.
        target_depths: batches finished by each target worker since the run started, replica after replica.
        rank_wait_s: each replica's wait for features.
    """

    segment: int
    step: int
    wall_time_s: float
    mono_time_s: float
    ce: float | None
    objective: float | None
    accuracy: float
    accepted_length: float
    coverage_frac: float
    grad_norm: float | None
    clip_coef: float | None
    lr: float
    warmup_factor: float
    skipped: bool
    nonfinite: tuple[str, ...]
    micro_batches: tuple[MicroBatchRecord, ...]
    plan_position: int
    padding_frac: float
    step_time_s: float
    wait_time_s: float
    tokens_per_s: float
    ready_depth: int
    feature_depth: int
    target_depths: tuple[int, ...]
    rank_wait_s: tuple[float, ...] = ()
    kind: Literal["step"] = "step"
    schema_version: int = LOG_SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class EventRecord:
    """Something that happened at a step."""

    segment: int
    step: int
    wall_time_s: float
    mono_time_s: float
    event: EventName
    details: Mapping[str, Any]
    kind: Literal["event"] = "event"
    schema_version: int = LOG_SCHEMA_VERSION
