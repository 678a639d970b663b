"""Names of metrics and tags in MLflow: constants, so that two runs always meet on the compare page.

Invariant: a metric's step is the optimizer step of the training log; a value that was not finite in the log
(null there) is left out rather than invented, and the step's `train/skipped` says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from dflash.records import EvaluationResult, SweepResult

TAG_GROUP = "group"
TAG_SEGMENT = "segment"
TAG_RUN = "run"
TAG_PARENT_RUN = "parent_run"
TAG_ROLLED_BACK_TO = "rolled_back_to_step"
TAG_ABANDONED_FOR = "abandoned_for_segment"

CHAMPION = "champion"
"""Alias of the best version of a registered model."""
TAG_DRAFTER = "drafter_sha256"
TAG_PATH = "artifact_path"

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
    "acceptance_length_untruncated": "acceptance_length_untruncated",
    "target_frac": "target_frac",
    "drafter_frac": "drafter_frac",
    "other_frac": "other_frac",
    "differing_prompts": "differing_prompts",
    "near_tie_prompts": "near_tie_prompts",
    "divergence_frac": "divergence_frac",
    "lossless": "lossless",
    "batch_size": "batch_size",
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
    metrics = {PROBE_ACCEPTANCE: float(details["acceptance_length"])}
    if details["acceptance_ci"] is not None:
        metrics["probe/acceptance_ci_low"], metrics["probe/acceptance_ci_high"] = map(float, details["acceptance_ci"])
    return metrics


SET_METRICS = ("acceptance_length", "acceptance_length_macro", "speedup", "speculative_tokens_per_s")
"""What is filed for each of several prompt sets, under `eval/<drafter>/<set>/`."""


def evaluation_metrics(result: EvaluationResult) -> dict[str, float]:
    """Metrics of one evaluation, under `eval/<drafter>/`: headline, intervals, speed, losslessness, positions, prompt sets."""
    prefix = f"eval/{result.drafter}"
    metrics = {
        f"{prefix}/{name}": float(value) for field, name in EVAL_FIELDS.items() if (value := getattr(result, field)) is not None
    }
    for name, interval in (("acceptance_ci", result.acceptance_ci), ("speedup_ci", result.speedup_ci)):
        if interval is not None:
            metrics[f"{prefix}/{name}_low"], metrics[f"{prefix}/{name}_high"] = interval
    for name, s_per_token in (("plain", result.plain_s_per_token), ("speculative", result.speculative_s_per_token)):
        if s_per_token:
            metrics[f"{prefix}/{name}_tokens_per_s"] = 1.0 / s_per_token
    for position, survival in enumerate(result.survival_per_position or (), start=1):
        metrics[f"{prefix}/survival_at_{position}"] = survival
    for position, accepted in enumerate(result.conditional_per_position or (), start=1):
        metrics[f"{prefix}/conditional_at_{position}"] = accepted
    sets = result.slices.get("dataset", {})
    if len(sets) > 1:
        for name, part in sets.items():
            metrics |= {f"{prefix}/{name}/{metric}": float(part[metric]) for metric in SET_METRICS if metric in part}
    return metrics


def sweep_metrics(result: SweepResult) -> dict[str, float]:
    """Metrics of a sweep's best setting, under `sweep/best/`."""
    best = result.best
    return {
        "sweep/best/block_size": float(best.block_size),
        "sweep/best/batch_size": float(best.batch_size),
        "sweep/best/temperature": best.temperature,
        "sweep/best/tokens_per_s": best.tokens_per_s,
        "sweep/best/speedup": best.speedup,
    }
