"""Names of metrics and tags in MLflow: constants, so that two runs always meet on the compare page.

Invariant: a metric's step is the optimizer step of the training log; a value that was not finite in the log
(null there) is left out rather than invented, and the step's `train/skipped` says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from dflash.records import EvaluationResult

TAG_GROUP = "group"
TAG_SEGMENT = "segment"
TAG_RUN = "run"
TAG_PARENT_RUN = "parent_run"
TAG_ROLLED_BACK_TO = "rolled_back_to_step"
TAG_ABANDONED_FOR = "abandoned_for_segment"

TRAIN_LOSS = "train/loss"
TRAIN_SKIPPED = "train/skipped"
BUCKET_LOSS = "train/bucket_loss/{bucket}"
PROBE_ACCEPTANCE = "probe/acceptance_length"

STEP_FIELDS = {
    "ce": TRAIN_LOSS,
    "objective": "train/objective",
    "accuracy": "train/accuracy",
    "accepted_length": "train/accepted_length",
    "coverage_frac": "train/coverage_frac",
    "grad_norm": "train/grad_norm",
    "clip_coef": "train/clip_coef",
    "lr": "train/lr",
    "tokens_per_s": "train/tokens_per_s",
    "step_time_s": "train/step_time_s",
    "wait_time_s": "train/wait_time_s",
    "padding_frac": "train/padding_frac",
    "ready_depth": "train/ready_depth",
    "feature_depth": "train/feature_depth",
    "skipped": TRAIN_SKIPPED,
}
"""Field of a step record -> metric."""

EVAL_FIELDS = {
    "acceptance_length": "acceptance_length",
    "acceptance_length_macro": "acceptance_length_macro",
    "accepted_length": "accepted_length",
    "speedup": "speedup",
    "plain_s_per_token": "plain_s_per_token",
    "speculative_s_per_token": "speculative_s_per_token",
}
"""Field of an evaluation -> metric, under `eval/<drafter>/`."""


def step_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of one step record of the training log, as parsed from JSON.

    Returns:
        Metric name -> value; nulls are left out, every bucket of the step has its own mean cross-entropy.
    """
    metrics = {name: float(record[field]) for field, name in STEP_FIELDS.items() if record.get(field) is not None}
    ce_sums: dict[int, float] = defaultdict(float)
    tokens: dict[int, int] = defaultdict(int)
    for micro in record.get("micro_batches", ()):
        if micro["ce_sum"] is not None and micro["n_tokens"]:
            ce_sums[micro["bucket"]] += micro["ce_sum"]
            tokens[micro["bucket"]] += micro["n_tokens"]
    metrics.update({BUCKET_LOSS.format(bucket=bucket): ce_sum / tokens[bucket] for bucket, ce_sum in sorted(ce_sums.items())})
    return metrics


def probe_metrics(details: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of an `acceptance_probe` event's details, under `probe/`; none of a probe without figures."""
    if "acceptance_length" not in details:
        return {}
    low, high = details["acceptance_ci"]
    return {
        PROBE_ACCEPTANCE: float(details["acceptance_length"]),
        "probe/acceptance_ci_low": float(low),
        "probe/acceptance_ci_high": float(high),
    }


def evaluation_metrics(result: EvaluationResult) -> dict[str, float]:
    """Metrics of one evaluation, under `eval/<drafter>/`: headline, interval, losslessness, one a position."""
    prefix = f"eval/{result.drafter}"
    metrics = {
        f"{prefix}/{name}": float(value) for field, name in EVAL_FIELDS.items() if (value := getattr(result, field)) is not None
    }
    metrics[f"{prefix}/acceptance_ci_low"], metrics[f"{prefix}/acceptance_ci_high"] = result.acceptance_ci
    metrics[f"{prefix}/lossless"] = float(result.lossless)
    for position, survival in enumerate(result.survival_per_position, start=1):
        metrics[f"{prefix}/survival_at_{position}"] = survival
    return metrics
