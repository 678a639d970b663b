"""Bootstrap over prompts: how far a pooled ratio would move with another draw of prompts.

Invariant: the resampling unit is the prompt, never the verification. Verifications of one answer are strongly
correlated (a list that is being copied is accepted for dozens of blocks), so resampling them would report intervals
several times too narrow. For the same reason the turns of one conversation are drawn together (`resample_groups`). All statistics
of one evaluation share the same resamples: ratios of them stay paired.

The hard decision: percentiles of the resamples are too narrow for few prompts (90 % instead of 95 for 8 of them, 93 for 32),
so their level is raised to what Student's t would ask for; simulated evaluations are then covered as often as is said.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from statistics import NormalDist

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


def resample_groups(groups: Sequence[Hashable], *, samples: int, seed: int) -> IntArray:
    """How often each prompt occurs in each resample where the prompts of one group are drawn together.

    Args:
        groups: of each prompt.
        samples: number R of resamples.
        seed: of the generator.

    Returns:
        `[R, P]` counts, the columns of a group alike; those of `resample_counts` if every prompt is a group of its own.
    """
    places = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    counts = resample_counts(len(places), samples=samples, seed=seed)
    return counts if len(places) == len(groups) else counts[:, [places[group] for group in groups]]


def drawn_apart(counts: IntArray, has_part: npt.ArrayLike) -> int:
    """How many of the prompts with `has_part` [P] are drawn independently: a group, whose columns are alike, is one."""
    return len({counts[:, place].tobytes() for place in np.flatnonzero(has_part)})


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


def widened(confidence: float, *, prompts: int) -> float:
    """The level of percentiles that makes a bootstrap over `prompts` prompts cover the truth with `confidence`.

    One prompt says nothing about others: its level is left as it is, and the interval has no width.

    Source: Hesterberg, What Teachers Should Know About the Bootstrap (2015), section 4.2 (expanded percentile interval).
    """
    if prompts < 2:
        return confidence
    half = student_quantile(0.5 + confidence / 2, degrees=prompts - 1)
    return 1.0 - 2.0 * NormalDist().cdf(-half * math.sqrt(prompts / (prompts - 1)))


def student_quantile(chance: float, *, degrees: int) -> float:
    """Quantile of Student's t distribution.

    Args:
        chance: in (0, 1).
        degrees: of freedom, at least 1.

    Returns:
        Exact for 1 and 2 degrees, else within 0.2 % for chances of 0.005 to 0.995.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    if degrees == 1:
        return math.tan(math.pi * (chance - 0.5))
    if degrees == 2:
        return (2 * chance - 1) / math.sqrt(2 * chance * (1 - chance))
    z = NormalDist().inv_cdf(chance)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return float(sum(term / float(degrees) ** power for power, term in enumerate(terms)))


def interval_over(values: npt.ArrayLike, *, prompts: int, confidence: float) -> tuple[float, float] | None:
    """Interval of resampled values that `prompts` independent prompts have a part in; None for one: it says nothing of others."""
    low, high = percentile_interval(values, confidence=widened(confidence, prompts=prompts))
    return (low, high) if prompts > 1 and math.isfinite(low) else None


def ratio_interval(
    numerators: npt.ArrayLike, denominators: npt.ArrayLike, *, counts: IntArray, confidence: float
) -> tuple[float, float] | None:
    """Bootstrap interval of the pooled ratio; one numerator and one denominator a prompt (see `resample_counts`)."""
    prompts = drawn_apart(counts, np.asarray(denominators) != 0)
    return interval_over(resampled_ratios(numerators, denominators, counts=counts), prompts=prompts, confidence=confidence)
