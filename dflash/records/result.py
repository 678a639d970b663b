"""Records of results: an evaluation and the summary of a whole run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RESULT_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Acceptance of one drafter on one prompt set (vocabulary of the specification, section 5).

    Attributes:
        acceptance_length: pooled tokens committed per target verification (accepted + 1), headline.
        acceptance_length_untruncated: the n+1 convention that counts tokens behind a stop id.
        accepted_length: accepted drafts per verification (without the target's own token).
        acceptance_ci: bootstrap interval over prompts at `confidence`.
        acceptance_length_macro: mean over prompts of each prompt's acceptance length.
        survival_per_position: share of verifications whose first k drafts were all accepted, k = 1..K-1.
        conditional_per_position: accepted at k given that k was reached.
        speedup: plain time per token / speculative time per token, prefill excluded, alternating.
        lossless: every prompt equal, or different only by the near-tie rule.
        differing_prompts, near_tie_prompts: losslessness as numbers.
    """

    drafter: str
    step: int | None
    dataset: str
    prompts: int
    block_size: int
    temperature: float
    template_flags: Mapping[str, Any]
    verifications: int
    drafted: int
    accepted: int
    committed_tokens: int
    acceptance_length: float
    acceptance_length_untruncated: float
    accepted_length: float
    acceptance_length_macro: float
    acceptance_ci: tuple[float, float]
    confidence: float
    survival_per_position: tuple[float, ...]
    conditional_per_position: tuple[float, ...]
    acceptance_histogram: tuple[int, ...]
    slices: Mapping[str, Any]
    plain_s_per_token: float | None
    speculative_s_per_token: float | None
    speedup: float | None
    lossless: bool
    differing_prompts: int
    near_tie_prompts: int
    warnings: tuple[str, ...]
    schema_version: int = RESULT_SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class RunSummary:
    """`summary.json`: the closing table of a run.

    Attributes:
        stage_busy_frac: share of its time that each stage of the replicas was at work, in the last segment.
        split_advice: which side set the pace, and whether another split of the devices would be faster.
    """

    run: str
    acceptance_length: float
    acceptance_length_untrained: float
    acceptance_ci95: tuple[float, float]
    acceptance_per_position: tuple[float, ...]
    speedup: float | None
    lossless: bool
    padding_efficiency: float
    longest_bucket_run: int
    feature_wait_frac: float
    health_verdict: str
    checkpoint: str
    steps: int
    train_time_s: float
    reused: tuple[str, ...]
    mlflow_run_id: str | None
    stage_busy_frac: Mapping[str, float] = field(default_factory=dict)
    split_advice: str = ""
    schema_version: int = RESULT_SCHEMA_VERSION
