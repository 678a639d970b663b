"""Robust baselines: the usual value and spread of the last accepted points, scaled by how much each point averages over.

Invariant: `level()` is the textbook computation over the points held when it was last refreshed (a test recomputes it
naively); a point beyond `winsor_z` enters at that height, so that one explosion cannot teach the baseline that
explosions are normal.

Four hard decisions. Per bucket instead of pooled: length buckets sit at very different losses, and a pooled spread
over such a mixture hides real spikes. Medians instead of means, which a single outlier moves. The spread is taken
from the differences of successive points, the usual value from the newest few: while the loss falls, the plain MAD of
64 points measures the fall (2 to 5 times the noise on a real demo run, where spikes of x5 then went unseen). And the
level is refreshed every eighth point only, which moves it by less than its own error and is most of the check's speed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec

# Standard deviation of normal noise over the median absolute difference of two of its values.
DIFFERENCE_TO_SD = 1.4826 / math.sqrt(2)
REFRESH_POINTS = 8
_KEPT_MEDIANS = 5  # refreshes: the lowest of them is where the level stood up to 40 points ago


class Level(msgspec.Struct, frozen=True, gc=False):
    """Where a baseline stands.

    Attributes:
        median: of the newest held values (logarithms): what is usual now.
        scale: max(1.4826 / sqrt(2) * median |difference of successive values|, floor).
        count: median number of samples that a held point averages over.
        floor: smallest scale, also for points that average over more samples than usual.
        lowest: smallest median of the last refreshes: what a slow rise is measured from.
    """

    median: float
    scale: float
    count: float
    floor: float
    lowest: float

    def scale_for(self, count: float) -> float:
        """Spread expected of a point that averages over `count` samples: wider for few, never below the floor."""
        scale = self.scale * math.sqrt(self.count / count)
        return max(self.floor, scale)

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

    Attributes:
        level: usual value, scale and reference count; None during the warm-up.
    """

    __slots__ = (
        "_capacity", "_counts", "_differences", "_floor", "_high", "_medians", "_min_points", "_newest",
        "_since_refresh", "_values", "_winsor_z", "level",
    )  # fmt: skip

    def __init__(self, *, capacity: int, min_points: int, newest: int, floor: float, winsor_z: float) -> None:
        self._capacity, self._min_points, self._newest = capacity, min_points, newest
        self._floor, self._winsor_z = floor, winsor_z
        self._values: deque[float] = deque(maxlen=capacity)
        self._counts: deque[float] = deque(maxlen=capacity)
        self._differences: deque[float] = deque(maxlen=capacity - 1)  # from each value to the next, without its sign
        self._medians: list[float] = []
        self._since_refresh = 0
        self._set_level(None)

    def __len__(self) -> int:
        return len(self._values)

    def deviations(self) -> list[float]:
        """How far each held point stands above its neighbours (not above the level: the loss falls); none in the warm-up."""
        level, values = self.level, list(self._values)
        if level is None:
            return []
        usual = (median_of_sorted(sorted(values[max(0, i - 3) : i + 4])) for i in range(len(values)))
        near = zip(values, usual, self._counts, strict=True)
        return [(value - median) / level.scale_for(count) for value, median, count in near]

    def accept(self, value: float, count: float) -> None:
        """Add a finite point; one too far above the current level enters winsorised, the oldest leaves."""
        level, values = self.level, self._values
        if value > self._high and level is not None:
            value = min(value, level.median + self._winsor_z * level.scale_for(count))
        if values:
            self._differences.append(abs(value - values[-1]))
        values.append(value)
        self._counts.append(count)
        self._since_refresh += 1
        if self._since_refresh >= REFRESH_POINTS or level is None:
            self._refresh()

    def _refresh(self) -> None:
        values = self._values
        if len(values) < self._min_points:
            return
        self._since_refresh = 0
        median = median_of_sorted(sorted(list(values)[-self._newest :]))
        self._medians.append(median)
        del self._medians[:-_KEPT_MEDIANS]
        level = Level(
            median=median,
            scale=max(DIFFERENCE_TO_SD * median_of_sorted(sorted(self._differences)), self._floor),
            count=median_of_sorted(sorted(self._counts)),
            floor=self._floor,
            lowest=min(self._medians),
        )
        self._set_level(level)

    def _set_level(self, level: Level | None) -> None:
        """Also the height that no winsorised point is below: nearly all points need no more than a look at it."""
        self.level = level
        self._high = math.inf if level is None else level.median + self._winsor_z * level.floor

    def state(self) -> dict[str, Any]:
        """Everything needed to continue, as plain values."""
        return {
            "capacity": self._capacity,
            "min_points": self._min_points,
            "newest": self._newest,
            "floor": self._floor,
            "winsor_z": self._winsor_z,
            "values": list(self._values),
            "counts": list(self._counts),
            "medians": list(self._medians),
            "since_refresh": self._since_refresh,
            "level": None if self.level is None else msgspec.to_builtins(self.level),
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
        baseline._values.extend(map(float, state["values"]))
        baseline._counts.extend(state["counts"])
        baseline._differences.extend(abs(later - earlier) for earlier, later in pairwise(baseline._values))
        baseline._medians, baseline._since_refresh = list(map(float, state["medians"])), int(state["since_refresh"])
        baseline._set_level(msgspec.convert(state["level"], Level | None))
        return baseline


def median_of_sorted(ordered: Sequence[float]) -> float:
    """Median of an ascending, non-empty sequence."""
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
