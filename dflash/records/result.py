"""Records of results: an evaluation and the summary of a whole run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash.records.sweep import RivalTable, SweepCell

RESULT_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class PromptSetEntry:
    """One set of prompts of an evaluation.

    Attributes:
        name: also its label in the slice `dataset`.
        origin: file's name, or hub repository, revision and file; the generator's name.
        sha256: of the bytes that were read (of all files together if there are several), or of the generated prompts.
        prompts: how many of its prompts were decoded, later turns counted.
    """

    name: str
    origin: str
    sha256: str
    prompts: int


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Acceptance of one drafter on one or several prompt sets (vocabulary of the specification, section 5).

    A figure is None where it was not measured: an engine that serves may tell less than a verification each, and nothing is
    inferred from what it leaves out. An evaluation in this process gives all of them (times only if there was a second token).

    Attributes:
        acceptance_length: pooled tokens committed per target verification (accepted + 1), headline.
        acceptance_length_untruncated: the n+1 convention that counts tokens behind a stop id.
        accepted_length: accepted drafts per verification (without the target's own token).
        acceptance_ci: bootstrap interval over prompts at `confidence`.
        acceptance_length_macro: mean over prompts of each prompt's acceptance length.
        survival_per_position: share of verifications whose first k drafts were all accepted, k = 1..K-1.
        conditional_per_position: accepted at k given that k was reached.
        drafted_per_position, reached_per_position, accepted_per_position: the counts behind them: verifications that proposed
            position k, that judged it too, and that accepted it.
        survival_untruncated_per_position: the same share with drafts behind a stop id or the length limit counted, which is
            what engines count.
        slices: by `kind`, `dataset`, `turn`, `context_tokens`, and `language` and `domain` where they are known.
        speedup: plain time per token / speculative time per token, both at `batch_size`, prefill excluded, alternating.
        speedup_ci: its bootstrap interval over prompts.
        target_frac, drafter_frac, other_frac: shares of the speculative time.
        lossless: every prompt equal, or different only by the near-tie rule.
        differing_prompts, near_tie_prompts: losslessness as numbers; divergence_frac: share of the prompts that differ.
        warnings: faults and alarms, one sentence each.
        batch_size: prompts decoded together, plainly and speculatively alike.
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
    accepted: int | None
    committed_tokens: int
    acceptance_length: float
    acceptance_length_untruncated: float | None
    accepted_length: float | None
    acceptance_length_macro: float | None
    acceptance_ci: tuple[float, float] | None
    confidence: float
    survival_per_position: tuple[float, ...] | None
    conditional_per_position: tuple[float, ...] | None
    acceptance_histogram: tuple[int, ...] | None
    slices: Mapping[str, Any]
    plain_s_per_token: float | None
    speculative_s_per_token: float | None
    speedup: float | None
    lossless: bool | None
    differing_prompts: int | None
    near_tie_prompts: int | None
    warnings: tuple[str, ...]
    survival_untruncated_per_position: tuple[float, ...] | None = None
    batch_size: int = 1
    prompt_sets: tuple[PromptSetEntry, ...] = ()
    drafted_per_position: tuple[int, ...] | None = None
    reached_per_position: tuple[int, ...] | None = None
    accepted_per_position: tuple[int, ...] | None = None
    speedup_ci: tuple[float, float] | None = None
    target_frac: float | None = None
    drafter_frac: float | None = None
    other_frac: float | None = None
    divergence_frac: float | None = None
    schema_version: int = RESULT_SCHEMA_VERSION

    @property
    def headline(self) -> str:
        """The acceptance length with its interval, where there is one."""
        if self.acceptance_ci is None:
            return f"acceptance length {self.acceptance_length:.2f} (no interval)"
        low, high = self.acceptance_ci
        return f"acceptance length {self.acceptance_length:.2f} [{low:.2f}, {high:.2f}]"


@dataclass(frozen=True, slots=True)
class RunSummary:
    """`summary.json`: the closing table of a run.

    Attributes:
        acceptance_ci95: interval at `confidence`; None where one prompt tells nothing.
        stage_busy_frac: share of its time that each stage of the replicas was at work, in the last segment.
        split_advice: which side set the pace, and whether another split of the devices would be faster.
        warnings: of the trained drafter's evaluation.
        baselines: of the same evaluation; None if it had none.
        best_setting: of the checkpoint's newest sweep; None if there is none.
    """

    run: str
    acceptance_length: float
    acceptance_length_untrained: float
    acceptance_ci95: tuple[float, float] | None
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
    warnings: tuple[str, ...] = ()
    baselines: RivalTable | None = None
    best_setting: SweepCell | None = None
    confidence: float = 0.95
    temperature: float = 0.0
    schema_version: int = RESULT_SCHEMA_VERSION
