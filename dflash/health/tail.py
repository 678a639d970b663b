"""How far out this run's own noise reaches: a power law fitted to its larger deviations (Hill 1975).

The hard decision: six deviations are a one-in-a-billion event only in normal noise. Losses of short batches have heavy
tails, and data with hard batches has a second hump; what the run has shown to do by itself is not worth a warning.
"""

from __future__ import annotations

import math

import msgspec

_FROM_Z = 3.0
_MAX_EXCESS, _LOUD_EXCESS = 1.6, 0.3  # logarithms: one huge spike may not declare all later ones usual
_KEPT = 32
_NEARLY, _LEAST_COUNTED = 0.85, 5  # a second hump: so many of the newest large deviations nearly as high
_PRIOR_EXCEEDED, _PRIOR_EXCESS, _PRIOR_POINTS = 2.0, 0.15, 100.0  # a young run: nearly normal


class Tail(msgspec.Struct):
    """Counts of the points seen and of those more than three deviations up, and by how much."""

    points: int = 0
    exceeded: int = 0
    excess: float = 0.0
    newest: list[float] = msgspec.field(default_factory=list)

    def see(self, z: float, *, loud: bool) -> None:
        """Take in one point; one that was warned of counts, but its height teaches little: three faults are no tail."""
        self.points += 1
        if z > _FROM_Z:
            self.exceeded += 1
            self.excess += min(math.log(z / _FROM_Z), _LOUD_EXCESS if loud else _MAX_EXCESS)
            self.newest = [*self.newest[1 - _KEPT :], round(z, 2)]

    def chance(self, z: float) -> float:
        """Chance of a single point to lie `z` or more deviations up, by what has been seen so far."""
        if z <= _FROM_Z:
            return 1.0
        index = (self.exceeded + _PRIOR_EXCEEDED) / (self.excess + _PRIOR_EXCEEDED * _PRIOR_EXCESS)
        rate = (self.exceeded + 1.0) / (self.points + _PRIOR_POINTS)
        beyond = sum(seen >= _NEARLY * z for seen in self.newest)
        counted = beyond / len(self.newest) if beyond >= _LEAST_COUNTED else 0.0
        return min(1.0, rate * max(math.exp(-index * math.log(z / _FROM_Z)), counted))
