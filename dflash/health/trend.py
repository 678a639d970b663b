"""Small statistics without a distributional assumption: trend, slope, chance. Pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt


def mann_kendall_decline_p(values: Sequence[float]) -> float:
    """One-sided p-value that `values` fall over time (Mann 1945, Kendall 1975; normal approximation with ties).

    Args:
        values: at least 3 numbers in order.

    Returns:
        Probability of a trend at least this downward if there were none; 1.0 for constant values.
    """
    series = np.asarray(values, dtype=np.float64)
    n = len(series)
    first, second = _pairs(n)
    s = float(np.sign(series[second] - series[first]).sum())
    _, ties = np.unique(series, return_counts=True)
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    if variance <= 0 or s >= 0:
        return 1.0
    return 0.5 * math.erfc(-(s + 1) / math.sqrt(2 * variance))


def theil_sen(values: Sequence[float]) -> tuple[float, float]:
    """Median slope per position and the fitted value at the last position (Theil 1950, Sen 1968).

    Args:
        values: at least 2 numbers in order.
    """
    series = np.asarray(values, dtype=np.float64)
    positions = np.arange(len(series), dtype=np.float64)
    first, second = _pairs(len(series))
    slope = float(np.median((series[second] - series[first]) / (positions[second] - positions[first])))
    intercept = float(np.median(series - slope * positions))
    return slope, intercept + slope * float(positions[-1])


def binomial_tail(successes: int, trials: int, rate: float) -> float:
    """P(X >= successes) for X ~ Binomial(trials, rate), summed outwards from `successes` (no term overflows)."""
    if successes <= 0 or rate >= 1.0:
        return 1.0
    if successes > trials or rate <= 0.0:
        return 0.0
    odds = rate / (1.0 - rate)
    if successes > trials * rate:
        return min(1.0, _terms(successes, trials, rate, lambda k: (trials - k) / (k + 1) * odds, step=1))
    return max(0.0, 1.0 - _terms(successes - 1, trials, rate, lambda k: k / ((trials - k + 1) * odds), step=-1))


def _terms(start: int, trials: int, rate: float, ratio: Callable[[int], float], *, step: int) -> float:
    log_term = math.lgamma(trials + 1) - math.lgamma(start + 1) - math.lgamma(trials - start + 1)
    term = math.exp(log_term + start * math.log(rate) + (trials - start) * math.log1p(-rate))
    total, k = term, start
    while term > 1e-17 * total and 0 <= k + step <= trials:
        term *= ratio(k)
        total += term
        k += step
    return total


@lru_cache(maxsize=64)
def _pairs(n: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Positions (i, j) of all pairs with i < j < n."""
    first, second = np.triu_indices(n, k=1)
    return first, second
