"""Intervals of what several contestants of one alternating run are worth, on one set of resamples of its prompts.

Dimensions: P prompts, R resamples.
Invariant: every ratio and every difference is formed inside a resample, so what two contestants share (the prompts, and how long
their answers are) cancels, and an interval of a comparison is narrower than the two intervals it compares.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from dflash.config import EvaluateConfig
from dflash.evaluate.bootstrap import FloatArray, IntArray, drawn_apart, interval_over, resample_groups, resampled_ratios
from dflash.evaluate.decode import PlainTrace, SpeculativeTrace
from dflash.evaluate.run import Evaluation

Interval = tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Share:
    """A ratio pooled over the prompts, that of every resample [R], and how many independent prompts have a part in it."""

    pooled: float
    resampled: FloatArray
    prompts: int

    def __truediv__(self, other: Share) -> Share:
        return Share(self.pooled / other.pooled, self.resampled / other.resampled, min(self.prompts, other.prompts))

    def __sub__(self, other: Share) -> Share:
        return Share(self.pooled - other.pooled, self.resampled - other.resampled, min(self.prompts, other.prompts))


class Resamples:
    """Resamples of an evaluation's prompts.

    Args:
        groups: what each prompt is drawn as (`prompts.drawn_together`), [P].
        evaluate: number and seed of the resamples, level of the intervals.
    """

    def __init__(self, groups: Sequence[Hashable], *, evaluate: EvaluateConfig) -> None:
        self._count = len(groups)
        self._confidence = evaluate.confidence
        self._counts: IntArray = resample_groups(groups, samples=evaluate.bootstrap_samples, seed=evaluate.seed)

    def speed(self, traces: Sequence[PlainTrace] | Sequence[SpeculativeTrace]) -> Share:
        """Tokens a second of decoding, each answer's first token and the prefill left out."""
        tokens = np.array([len(trace.tokens) - 1 for trace in traces], dtype=np.float64)
        seconds = np.where(tokens > 0, [trace.decode_s for trace in traces], 0.0)
        return self._share(tokens, seconds)

    def acceptance(self, evaluation: Evaluation) -> Share:
        """Tokens that reached the answers for each verification."""
        table = evaluation.table
        passes = table.sum_by_prompt(np.ones(len(table), dtype=np.int64), prompts=self._count)
        return self._share(table.sum_by_prompt(table.counted, prompts=self._count), passes)

    def plain_acceptance(self) -> Share:
        """One token a forward, whatever the prompts."""
        return Share(1.0, np.ones(len(self._counts)), self._count)

    def interval(self, share: Share) -> Interval:
        """Its central interval; None where a single prompt has a part in it, or nothing is finite."""
        return interval_over(share.resampled, prompts=share.prompts, confidence=self._confidence)

    def _share(self, numerators: FloatArray | IntArray, denominators: FloatArray | IntArray) -> Share:
        bottom = float(denominators.sum())
        pooled = float(numerators.sum()) / bottom if bottom else math.nan
        prompts = drawn_apart(self._counts, denominators != 0)
        return Share(pooled, resampled_ratios(numerators, denominators, counts=self._counts), prompts)
