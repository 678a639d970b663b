"""Small statistics without a distributional assumption: trend, slope, chance. Pure functions of numbers."""

from __future__ import annotations

import math
from collections import Counter
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
    n, column, later = len(series), series[:, None], _later(len(series))
    s = int(np.count_nonzero((series > column) & later)) - int(np.count_nonzero((series < column) & later))
    if s >= 0:
        return 1.0
    ties = sum([count * (count - 1) * (2 * count + 5) for count in Counter(values).values() if count > 1])
    variance = (n * (n - 1) * (2 * n + 5) - ties) / 18
    if variance <= 0:
        return 1.0
    return 0.5 * math.erfc(-(s + 1) / math.sqrt(2 * variance))


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile of a few numbers, linear between neighbours: what numpy gives, without what its generality costs.

    Args:
        values: at least one number, in any order.
        percent: from 0 to 100.
    """
    ordered = sorted(values)
    place = percent / 100 * (len(ordered) - 1)
    low = int(place)
    high, part = min(low + 1, len(ordered) - 1), place - low
    step = ordered[high] - ordered[low]
    return ordered[high] - step * (1 - part) if part >= 0.5 else ordered[low] + step * part


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


@lru_cache(maxsize=64)
def _later(n: int) -> npt.NDArray[np.bool_]:
    """Of row i, the places j > i, shape (n, n)."""
    return np.triu(np.ones((n, n), dtype=np.bool_), k=1)
