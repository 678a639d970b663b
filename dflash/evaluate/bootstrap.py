"""Bootstrap over prompts: how far a pooled ratio would move with another draw of prompts.

Invariant: the resampling unit is the prompt, never the verification. Verifications of one answer are strongly
correlated (a list that is being copied is accepted for dozens of blocks), so resampling them would report intervals
several times too narrow. All statistics of one evaluation share the same resamples: ratios of them stay paired.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


def resample_counts(prompts: int, *, samples: int, seed: int) -> IntArray:
    """How often each prompt occurs in each resample.

    Args:
        prompts: number P of prompts, at least 1.
        samples: number R of resamples.
        seed: seed of the generator; the same arguments give the same counts.

    Returns:
        `[R, P]` counts; every row sums to P.
    """
    generator = np.random.default_rng(seed)
    return generator.multinomial(prompts, np.full(prompts, 1.0 / prompts), size=samples).astype(np.int64)


def resampled_ratios(numerators: npt.ArrayLike, denominators: npt.ArrayLike, *, counts: IntArray) -> FloatArray:
    """Pooled ratio `sum(numerators) / sum(denominators)` of every resample, `[R]`; NaN where the denominator is 0."""
    top = counts @ np.asarray(numerators, dtype=np.float64)
    bottom = counts @ np.asarray(denominators, dtype=np.float64)
    ratios: FloatArray = np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom != 0)
    return ratios


def percentile_interval(values: npt.ArrayLike, *, confidence: float) -> tuple[float, float]:
    """Central interval of resampled values that holds `confidence` of them (NaNs left out).

    Returns:
        Lower and upper end; both NaN if no value is finite.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13 (percentile method).
    """
    finite = np.asarray(values, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    if finite.size == 0:
        return (float("nan"), float("nan"))
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(finite, [tail, 1.0 - tail])
    return (float(low), float(high))


def ratio_interval(
    numerators: npt.ArrayLike, denominators: npt.ArrayLike, *, counts: IntArray, confidence: float
) -> tuple[float, float]:
    """Bootstrap interval of the pooled ratio; one numerator and one denominator a prompt (see `resample_counts`)."""
    return percentile_interval(resampled_ratios(numerators, denominators, counts=counts), confidence=confidence)
