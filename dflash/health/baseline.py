"""Robust baselines: the usual value and spread of the last accepted points, scaled by how much each point averages over.

Invariant: `level()` equals the textbook computation over the held points (a test recomputes it naively); a point
beyond `winsor_z` enters at that height, so that one explosion cannot teach the baseline that explosions are normal.

Three hard decisions. Per bucket instead of pooled: length buckets sit at very different losses, and a pooled spread
over such a mixture hides real spikes. Medians instead of means, which a single outlier moves. And the spread is taken
from the differences of successive points, the usual value from the newest few: while the loss falls, the plain MAD of
64 points measures the fall (2 to 5 times the noise on a real demo run, where spikes of x5 then went unseen).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import msgspec

# Standard deviation of normal noise over the median absolute difference of two of its values.
DIFFERENCE_TO_SD = 1.4826 / math.sqrt(2)


class Level(msgspec.Struct, frozen=True):
    """Where a baseline stands.

    Attributes:
        median: of the newest held values (logarithms): what is usual now.
        scale: max(1.4826 / sqrt(2) * median |difference of successive values|, floor).
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
        min_points: points before a level is given (warm-up), at least 2.
        newest: of the held points, how many give the usual value.
        floor: smallest scale.
        winsor_z: deviation at which larger points are accepted.
    """

    def __init__(self, *, capacity: int, min_points: int, newest: int, floor: float, winsor_z: float) -> None:
        self._settings = {"capacity": capacity, "min_points": min_points, "newest": newest}
        self._capacity, self._min_points, self._newest = capacity, min_points, newest
        self._floor, self._winsor_z = floor, winsor_z
        self._values: list[float] = []
        self._counts: list[float] = []
        self._ordered_newest: list[float] = []
        self._ordered_counts: list[float] = []
        self._ordered_differences: list[float] = []
        self._level: Level | None = None

    def __len__(self) -> int:
        return len(self._values)

    def level(self) -> Level | None:
        """Usual value, scale and reference count, or None during the warm-up."""
        if self._level is None and len(self._values) >= self._min_points:
            self._level = Level(
                median=median_of_sorted(self._ordered_newest),
                scale=max(DIFFERENCE_TO_SD * median_of_sorted(self._ordered_differences), self._floor),
                count=median_of_sorted(self._ordered_counts),
                floor=self._floor,
            )
        return self._level

    def accept(self, value: float, count: float) -> None:
        """Add a finite point; one too far above the current level enters winsorised, the oldest leaves."""
        level = self.level()
        if level is not None:
            value = min(value, level.median + self._winsor_z * level.scale_for(count))
        self._level = None
        self._append(value, count)
        if len(self._values) > self._capacity:
            _remove(self._ordered_differences, abs(self._values[1] - self._values[0]))
            _remove(self._ordered_counts, self._counts[0])
            del self._values[0], self._counts[0]

    def _append(self, value: float, count: float) -> None:
        if self._values:
            insort(self._ordered_differences, abs(value - self._values[-1]))
        if len(self._values) >= self._newest:
            _remove(self._ordered_newest, self._values[-self._newest])
        self._values.append(value)
        self._counts.append(count)
        insort(self._ordered_newest, value)
        insort(self._ordered_counts, count)

    def state(self) -> dict[str, Any]:
        """Everything needed to continue, as plain values."""
        return {
            **self._settings,
            "floor": self._floor,
            "winsor_z": self._winsor_z,
            "values": list(self._values),
            "counts": list(self._counts),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Baseline:
        """The baseline that gave `state`."""
        baseline = cls(
            capacity=state["capacity"],
            min_points=state["min_points"],
            newest=state["newest"],
            floor=state["floor"],
            winsor_z=state["winsor_z"],
        )
        for value, count in zip(state["values"], state["counts"], strict=True):
            baseline._append(value, count)
        return baseline


def _remove(ordered: list[float], value: float) -> None:
    del ordered[bisect_left(ordered, value)]


def median_of_sorted(ordered: Sequence[float]) -> float:
    """Median of an ascending, non-empty sequence."""
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
