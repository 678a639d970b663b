"""Intervals of what several contestants of one alternating run are worth, on one set of resamples of its prompts.

Dimensions: P prompts, R resamples.
Invariant: every ratio and every difference is formed inside a resample, so what two contestants share (the prompts, and how long
their answers are) cancels, and an interval of a comparison is narrower than the two intervals it compares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash.config import EvaluateConfig
from dflash.evaluate.bootstrap import FloatArray, IntArray, percentile_interval, resample_counts, resampled_ratios, widened
from dflash.evaluate.decode import PlainTrace, SpeculativeTrace
from dflash.evaluate.run import Evaluation

Interval = tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Share:
    """A ratio pooled over the prompts, and that of every resample [R]."""

    pooled: float
    resampled: FloatArray


class Resamples:
    """Resamples of an evaluation's prompts.

    Args:
        count: P.
        evaluate: number and seed of the resamples, level of the intervals.
    """

    def __init__(self, count: int, *, evaluate: EvaluateConfig) -> None:
        self._count = count
        self._confidence = evaluate.confidence
        self._counts: IntArray = resample_counts(count, samples=evaluate.bootstrap_samples, seed=evaluate.seed)

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
        return Share(1.0, np.ones(len(self._counts)))

    def interval(self, values: FloatArray) -> Interval:
        """Central interval of resampled values [R]; None for a single prompt, or where nothing is finite."""
        if self._count < 2:
            return None
        low, high = percentile_interval(values, confidence=widened(self._confidence, prompts=self._count))
        return (low, high) if math.isfinite(low) and math.isfinite(high) else None

    def _share(self, numerators: FloatArray | IntArray, denominators: FloatArray | IntArray) -> Share:
        bottom = float(denominators.sum())
        pooled = float(numerators.sum()) / bottom if bottom else math.nan
        return Share(pooled, resampled_ratios(numerators, denominators, counts=self._counts))
