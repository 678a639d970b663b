"""Whether a run's acceptance is better than another's: bootstrap over the prompts, paired where both decoded the same ones.

The hard decision: the verdict is read from the interval of the difference, never from two intervals that do or do not overlap.
Prompts differ far more than drafters do; on common prompts that part cancels, and differences of a tenth become visible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dflash.evaluate.bootstrap import IntArray, drawn_apart, interval_over, resample_groups, resampled_ratios

Word = Literal["better", "worse", "no difference"]

SAMPLES = 4000
MIN_PAIRS = 8
"""Common prompts below which runs are not paired, and independent ones below which nothing is called better or worse."""


@dataclass(frozen=True, slots=True)
class PromptScore:
    """One prompt's answer: `tokens` committed in `verifications` target passes.

    Attributes:
        drawn_as: what the bootstrap draws together with it (the turns of a conversation); empty: it is drawn alone.
    """

    prompt_hash: str
    kind: str
    tokens: int
    verifications: int
    drawn_as: str = ""


@dataclass(frozen=True, slots=True)
class Difference:
    """Acceptance length of a run against a reference.

    Attributes:
        kind: kind of prompts, or `all`.
        reference, other: pooled acceptance lengths on the prompts that were used.
        difference: other - reference; `low`, `high`: its interval at `confidence`, None where one prompt tells nothing.
        prompts: used; `paired`: the same ones of both runs; `apart`: of them independent of each other.
        chance: two-sided bootstrap tail: how often a resample falls on the other side of no difference.
    """

    kind: str
    reference: float
    other: float
    difference: float
    low: float | None
    high: float | None
    confidence: float
    prompts: int
    apart: int
    paired: bool
    chance: float

    @property
    def interval_words(self) -> str:
        """Its ends in brackets."""
        return "[no interval]" if self.low is None or self.high is None else f"[{self.low:+.2f}, {self.high:+.2f}]"

    @property
    def word(self) -> Word:
        """Better or worse only if the whole interval lies on one side of zero."""
        if self.low is None or self.high is None or self.apart < MIN_PAIRS or not self.low * self.high > 0:
            return "no difference"
        return "better" if self.low > 0 else "worse"


def differences(
    reference: Sequence[PromptScore], other: Sequence[PromptScore], *, confidence: float, seed: int
) -> tuple[Difference, ...]:
    """Compare two runs over all prompts, then over each kind that both have.

    Args:
        reference: scores of the one run, one an evaluated prompt.
        other: scores of the other.
        confidence: of the intervals.
        seed: of the resamples.

    Returns:
        `all` first; empty if either run has no scores. Answers without a verification say nothing and are left out.
    """
    reference, other = ([score for score in scores if score.verifications] for scores in (reference, other))
    if not reference or not other:
        return ()
    kinds = sorted({score.kind for score in reference} & {score.kind for score in other})
    parts = [("all", list(reference), list(other))]
    if len(kinds) > 1:
        parts += [(kind, [s for s in reference if s.kind == kind], [s for s in other if s.kind == kind]) for kind in kinds]
    return tuple(_difference(kind, a, b, confidence=confidence, seed=seed) for kind, a, b in parts)


def _difference(kind: str, reference: list[PromptScore], other: list[PromptScore], *, confidence: float, seed: int) -> Difference:
    theirs = _by_prompt(other)
    pairs = [(score, theirs[prompt]) for prompt, score in _by_prompt(reference).items() if prompt in theirs]
    paired = len(pairs) >= MIN_PAIRS
    if paired:
        reference, other = [a for a, _ in pairs], [b for _, b in pairs]
    first = _resampled(reference, seed)
    second = first if paired else _resampled(other, seed + 1)
    moved = _ratios(other, second) - _ratios(reference, first)
    prompts = min(len(reference), len(other))
    apart = min(drawn_apart(counts, np.ones(counts.shape[1])) for counts in (first, second))
    low, high = interval_over(moved, prompts=apart, confidence=confidence) or (None, None)
    a, b = pooled(reference), pooled(other)
    return Difference(
        kind=kind,
        reference=a,
        other=b,
        difference=b - a,
        low=low,
        high=high,
        confidence=confidence,
        prompts=prompts,
        apart=apart,
        paired=paired,
        chance=min(1.0, 2.0 * min(float((moved <= 0).mean()), float((moved >= 0).mean()))),
    )


def _by_prompt(scores: Sequence[PromptScore]) -> dict[tuple[str, int], PromptScore]:
    """By prompt, and how often it was asked before: a prompt that occurs twice is a pair with its own double."""
    before: Counter[str] = Counter()
    found: dict[tuple[str, int], PromptScore] = {}
    for score in scores:
        found[score.prompt_hash, before[score.prompt_hash]] = score
        before[score.prompt_hash] += 1
    return found


def pooled(scores: Sequence[PromptScore]) -> float:
    """Pooled acceptance length: tokens committed per verification."""
    passes = sum(score.verifications for score in scores)
    return sum(score.tokens for score in scores) / passes if passes else float("nan")


def interval(scores: Sequence[PromptScore], *, confidence: float, seed: int) -> tuple[float, float] | None:
    """Bootstrap interval of the pooled acceptance length of one run; None for one prompt, which says nothing about others."""
    counts = _resampled(scores, seed)
    return interval_over(_ratios(scores, counts), prompts=drawn_apart(counts, np.ones(len(scores))), confidence=confidence)


def _resampled(scores: Sequence[PromptScore], seed: int) -> IntArray:
    groups: list[str | int] = [score.drawn_as or place for place, score in enumerate(scores)]
    return resample_groups(groups, samples=SAMPLES, seed=seed)


def by_kind(scores: Sequence[PromptScore]) -> Mapping[str, list[PromptScore]]:
    """The scores of each kind of prompt, by name."""
    kinds: dict[str, list[PromptScore]] = {}
    for score in sorted(scores, key=lambda score: score.kind):
        kinds.setdefault(score.kind, []).append(score)
    return kinds


def _ratios(scores: Sequence[PromptScore], counts: np.ndarray) -> np.ndarray:
    return resampled_ratios([s.tokens for s in scores], [s.verifications for s in scores], counts=counts)
