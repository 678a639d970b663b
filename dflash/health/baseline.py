"""Robust baselines: the median and spread of the last accepted points, scaled by how much each point averages over.

Invariant: `level()` equals the textbook computation over the held points (a test recomputes it naively); a point
beyond `winsor_z` enters at that height, so that one explosion cannot teach the baseline that explosions are normal.

The hard decision: median and 1.4826 * MAD instead of mean and standard deviation (a single outlier moves those), per
bucket instead of pooled: length buckets sit at very different losses, and a pooled spread over such a mixture hides
real spikes. Both orders are kept sorted, so a point costs a few microseconds instead of four sorts of 64.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import msgspec

MAD_TO_SD = 1.4826  # of a normal distribution


class Level(msgspec.Struct, frozen=True):
    """Where a baseline stands.

    Attributes:
        median: of the held values (logarithms).
        scale: max(1.4826 * MAD, floor).
        count: median number of samples that a held point averages over.
        floor: smallest scale, also for points that average over more samples than usual.
    """

    median: float
    scale: float
    count: float
    floor: float

    def scale_for(self, count: float) -> float:
        """Spread expected of a point that averages over `count` samples: wider for few, never below the floor."""
        return max(self.scale * math.sqrt(self.count / count), self.floor)

    def z(self, value: float, count: float) -> float:
        """Deviations of `value` above the median, in expected spreads."""
        return (value - self.median) / self.scale_for(count)

    def band(self, z: float) -> tuple[float, float]:
        """The median and the value `z` spreads above it, of a usual point, out of the logarithm."""
        return math.exp(self.median), math.exp(self.median + z * self.scale)


class Baseline:
    """The last `capacity` accepted points of one series.

    Args:
        capacity: points held.
        min_points: points before a level is given (warm-up).
        floor: smallest scale.
        winsor_z: deviation at which larger points are accepted.
    """

    def __init__(self, *, capacity: int, min_points: int, floor: float, winsor_z: float) -> None:
        self._capacity = capacity
        self._min_points = min_points
        self._floor = floor
        self._winsor_z = winsor_z
        self._values: list[float] = []
        self._counts: list[float] = []
        self._ordered: list[float] = []
        self._ordered_counts: list[float] = []
        self._level: Level | None = None

    def __len__(self) -> int:
        return len(self._values)

    def level(self) -> Level | None:
        """Median, scale and reference count, or None during the warm-up."""
        if self._level is None and len(self._values) >= self._min_points:
            centre = median_of_sorted(self._ordered)
            spread = MAD_TO_SD * median_deviation(self._ordered, centre)
            self._level = Level(
                median=centre,
                scale=max(spread, self._floor),
                count=median_of_sorted(self._ordered_counts),
                floor=self._floor,
            )
        return self._level

    def newest_above(self, z: float) -> tuple[int, int]:
        """Of the newer half of the held points: how many lie over `z` spreads above the median, and how many there are."""
        level = self.level()
        newest = self._values[len(self._values) // 2 :]
        return (0 if level is None else sum(value > level.median + z * level.scale for value in newest)), len(newest)

    def accept(self, value: float, count: float) -> None:
        """Add a finite point; one too far above the current level enters winsorised, the oldest leaves."""
        level = self.level()
        if level is not None:
            value = min(value, level.median + self._winsor_z * level.scale_for(count))
        if len(self._values) == self._capacity:
            old, old_count = self._values.pop(0), self._counts.pop(0)
            del self._ordered[bisect_left(self._ordered, old)]
            del self._ordered_counts[bisect_left(self._ordered_counts, old_count)]
        self._values.append(value)
        self._counts.append(count)
        insort(self._ordered, value)
        insort(self._ordered_counts, count)
        self._level = None

    def state(self) -> dict[str, Any]:
        """Everything needed to continue, as plain values."""
        return {
            "capacity": self._capacity,
            "min_points": self._min_points,
            "floor": self._floor,
            "winsor_z": self._winsor_z,
            "values": list(self._values),
            "counts": list(self._counts),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Baseline:
        """The baseline that gave `state`."""
        baseline = cls(capacity=state["capacity"], min_points=state["min_points"], floor=state["floor"], winsor_z=state["winsor_z"])
        baseline._values = [float(value) for value in state["values"]]
        baseline._counts = [float(count) for count in state["counts"]]
        baseline._ordered = sorted(baseline._values)
        baseline._ordered_counts = sorted(baseline._counts)
        return baseline


def median_of_sorted(ordered: Sequence[float]) -> float:
    """Median of an ascending, non-empty sequence."""
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def median_deviation(ordered: Sequence[float], centre: float) -> float:
    """Median of |x - centre| over an ascending, non-empty sequence, without sorting the deviations."""
    half = len(ordered) // 2
    upper = _nearest(ordered, centre, rank=half + 1)
    if len(ordered) % 2:
        return upper
    return (_nearest(ordered, centre, rank=half) + upper) / 2


def _nearest(ordered: Sequence[float], centre: float, *, rank: int) -> float:
    """The `rank`-th smallest |x - centre|: the `rank` nearest values are neighbours, found by bisection."""
    low, high = 0, len(ordered) - rank
    while low < high:
        middle = (low + high) // 2
        if centre - ordered[middle] > ordered[middle + rank] - centre:
            low = middle + 1
        else:
            high = middle
    return max(centre - ordered[low], ordered[low + rank - 1] - centre)
