"""How far out this run's own noise reaches: a power law through its largest deviations (Hill 1975).

The hard decision: six deviations are a one-in-a-billion event only in normal noise. Losses of short batches have heavy
tails, and data with hard batches has a second hump; what the run has shown to do by itself is not worth a warning. The
law is fitted to the few largest deviations and not to all large ones: a hump of hard batches ends, and a law drawn
through the whole of it would expect any height beyond. And a height teaches only `_LEARN_AFTER` steps later: spikes that
belong together may not excuse each other.
"""

from __future__ import annotations

import math
from bisect import insort

import msgspec

FROM_Z = 3.0
"""Deviations from which on a point is looked at."""
_LOUD_FACTOR = 1.35  # times `FROM_Z`: the most that a height which was warned of may teach
_TOP = 16
_LEARN_AFTER = 20
_KEPT, _NEARLY, _LEAST_COUNTED = 32, 0.85, 5  # a second hump: so many of the newest large deviations nearly as high
_PRIOR_EXCEEDED, _PRIOR_EXCESS, _PRIOR_POINTS = 2.0, 0.2, 100.0  # a young run: nearly normal


class Tail(msgspec.Struct):
    """Counts of the points seen and of those more than three deviations up, with the largest and the newest heights.

    Attributes:
        top: the largest heights, ascending; those warned of count, but their heights are cut.
        newest: heights as they were.
        pending: (step, height, whether warned of) not learnt from yet.
    """

    points: int = 0
    exceeded: int = 0
    top: list[float] = msgspec.field(default_factory=list)
    newest: list[float] = msgspec.field(default_factory=list)
    pending: list[tuple[int, float, bool]] = msgspec.field(default_factory=list)

    def see(self, z: float, *, step: int, loud: bool) -> None:
        """Take in one point; one that was warned of counts, but its height teaches little: three faults are no tail."""
        self.points += 1
        if z > FROM_Z:
            self._catch_up(step)
            self.pending.append((step, z, loud))

    def learn(self, z: float, *, loud: bool) -> None:
        """Take in the height of a point that has been counted."""
        if z > FROM_Z:
            self.exceeded += 1
            insort(self.top, min(z, _LOUD_FACTOR * FROM_Z) if loud else z)
            if len(self.top) > _TOP:
                del self.top[0]
            self.newest = [*self.newest[1 - _KEPT :], round(z, 2)]

    def _catch_up(self, step: int) -> None:
        pending = self.pending
        while pending and pending[0][0] <= step - _LEARN_AFTER:
            _, z, loud = pending.pop(0)
            self.learn(z, loud=loud)

    def chance(self, z: float, *, step: int) -> float:
        """Chance of a single point of `step` to lie `z` or more deviations up, by what has been seen so far."""
        if z <= FROM_Z:
            return 1.0
        self._catch_up(step)
        points = self.points + _PRIOR_POINTS
        large = (self.exceeded + 1.0) / points
        begin, reached = FROM_Z, large
        if self.exceeded > _TOP:
            begin, reached = self.top[0], (_TOP + 1.0) / points
        if z <= begin:
            chance = large * math.pow(reached / large, math.log(z / FROM_Z) / math.log(begin / FROM_Z))
        else:
            excess = sum([math.log(seen / begin) for seen in self.top]) + _PRIOR_EXCEEDED * _PRIOR_EXCESS
            chance = reached * math.exp(-(len(self.top) + _PRIOR_EXCEEDED) / excess * math.log(z / begin))
        beyond = sum([seen >= _NEARLY * z for seen in self.newest])
        if beyond >= _LEAST_COUNTED:
            chance = max(chance, large * beyond / len(self.newest))
        return min(1.0, chance)
