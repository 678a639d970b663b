"""Records of the model registry: what a registered drafter was measured with, and what came of its challenge."""

from __future__ import annotations

from dataclasses import dataclass

from dflash.records.probe import ProbeFigures

REGISTRY_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class RegisteredEvidence:
    """What a registered drafter reached on one set of prompts, prompt by prompt; lies beside its weights.

    Attributes:
        run, step, segment: the checkpoint that it was exported from.
        drafter_sha256: over its configuration and weights: the drafter's identity.
        target_fingerprint: of the target that it was trained on.
        prompts_sha256: of the prompts and of all settings that acceptance hangs on; only equal ones are comparable.
    """

    run: str
    step: int
    segment: int
    drafter_sha256: str
    target_fingerprint: str
    prompts_sha256: str
    figures: ProbeFigures
    schema_version: int = REGISTRY_SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Ruling:
    """Whether a challenger becomes the champion, and why.

    Attributes:
        gain: interval of its acceptance length minus the champion's on the same prompts; None where none was compared.
    """

    moves: bool
    reason: str
    gain: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class RegisteredDrafter:
    """A version of a registered model.

    Attributes:
        created: whether this call made it; the same drafter is registered once.
        champion: whether it bears the alias now.
    """

    model: str
    version: str
    created: bool
    champion: bool
    ruling: Ruling
