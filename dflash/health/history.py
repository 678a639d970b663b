"""Curves for the report, thinned to a bounded number of points.

Invariant: which points are kept depends on the records alone, never on how the log was cut into readings: every
`stride`-th record of a series, the stride doubling whenever the series is full.
"""

from __future__ import annotations

import msgspec

MAX_POINTS = 300


class Point(msgspec.Struct, frozen=True, array_like=True):
    """A value at a step, with the baseline's median and upper limit at that time (None during its warm-up)."""

    step: int
    value: float
    usual: float | None
    limit: float | None


class Curve(msgspec.Struct):
    """One thinned series."""

    points: list[Point] = msgspec.field(default_factory=list)
    stride: int = 1
    seen: int = 0

    def wants_next(self) -> bool:
        """Count the next record of the series, and say whether its point is to be kept."""
        self.seen += 1
        return (self.seen - 1) % self.stride == 0

    def keep(self, step: int, value: float, *, band: tuple[float | None, float | None]) -> None:
        """Keep a point that was wanted, to as many digits as a picture shows."""
        usual, limit = band
        self.points.append(Point(step, _rounded(value), usual and _rounded(usual), limit and _rounded(limit)))
        if len(self.points) > MAX_POINTS:
            self.points = self.points[::2]
            self.stride *= 2

    def rewind(self, step: int) -> None:
        """Forget the points from `step` on."""
        while self.points and self.points[-1].step >= step:
            self.points.pop()


class History(msgspec.Struct):
    """The curves: loss by bucket, gradient norm by composition of the update."""

    loss: dict[int, Curve] = msgspec.field(default_factory=dict)
    grad_norm: dict[str, Curve] = msgspec.field(default_factory=dict)

    def rewind(self, step: int) -> None:
        """Forget everything from `step` on."""
        for curve in (*self.loss.values(), *self.grad_norm.values()):
            curve.rewind(step)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
