"""Records of acceptance probes: what decoding a few held-out prompts with one checkpoint gave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PROBE_SCHEMA_VERSION = 1

ProbeOutcome = Literal["begun", "measured", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class ProbeFigures:
    """What a probe measured.

    Attributes:
        counted: tokens of each prompt's answer that verifications committed; verifications: target forwards that took, both by
            prompt, so that two probes of the same prompts can be compared in pairs.
        acceptance_length: pooled, `sum(counted) / sum(verifications)`; acceptance_ci: bootstrap interval over prompts, None where
            one prompt tells nothing.
        survival_per_position: share of verifications whose first k drafts reached the answer, k = 1..K-1.
        decode_s: wall time of the decoding.
    """

    acceptance_length: float
    acceptance_ci: tuple[float, float] | None
    counted: tuple[int, ...]
    verifications: tuple[int, ...]
    survival_per_position: tuple[float, ...]
    decode_s: float


@dataclass(frozen=True, slots=True)
class ProbeRecord:
    """One line of a run's probes, appended by its one probing process.

    Attributes:
        step, segment: the checkpoint, by its manifest.
        prompts_sha256: of the prompts and of all settings that acceptance hangs on; only equal ones are comparable.
        outcome: `begun` is followed by one of the others, unless the process died.
        reason: why there are no figures; empty if there are.
    """

    step: int
    segment: int
    prompts_sha256: str
    outcome: ProbeOutcome
    at: str
    reason: str
    figures: ProbeFigures | None
    schema_version: int = PROBE_SCHEMA_VERSION
