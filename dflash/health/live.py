"""Which records count: the live-record rule over segments, as records arrive.

A record at s is live iff no later segment starts at or before s. So a segment that starts at s0 kills everything from
s0 on that was written before it, whether it is written again or not.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ArrivalKind = Literal["next", "gap", "duplicate", "backwards", "abandoned"]
_MAX_GAPS = 256


class Arrival(msgspec.Struct, frozen=True):
    """How a step record fits behind what is there.

    Attributes:
        kind: `next` and `gap` are live; the others are not judged.
        missing: first and last step that is missing before it, for `gap`.
    """

    kind: ArrivalKind
    missing: tuple[int, int] | None


class LiveSteps(msgspec.Struct):
    """The live steps so far: [0, last] without the gaps.

    Attributes:
        segment: current segment, -1 before the first.
        last: newest live step, -1 before the first.
        gaps: (first, last) missing steps, ascending.
        merged_missing: missing steps of gaps too old to be kept one by one.
        dead: records that a later segment has taken the life of.
    """

    segment: int = -1
    last: int = -1
    gaps: list[tuple[int, int]] = msgspec.field(default_factory=list)
    merged_missing: int = 0
    dead: int = 0
    segments: int = 0

    def covered(self) -> int:
        """Number of live steps that the log holds."""
        return self.last + 1 - self.merged_missing - sum(last - first + 1 for first, last in self.gaps)

    def begins_segment(self, segment: int) -> bool:
        """Whether a record or event of `segment` is the first of a new one."""
        return segment > self.segment

    def begin_segment(self, segment: int, step: int) -> None:
        """Start `segment` at `step`: what lies at or behind it is no longer live."""
        before = self.covered()
        self.segment = segment
        self.segments += 1
        if step <= self.last:
            self.last = step - 1
            self.gaps = [(first, min(last, self.last)) for first, last in self.gaps if first <= self.last]
            self.dead += before - self.covered()

    def arrive(self, segment: int, step: int) -> Arrival:
        """Place a step record of the current segment (or of an older one)."""
        if segment < self.segment:
            return Arrival("abandoned", None)
        if step == self.last:
            return Arrival("duplicate", None)
        if step < self.last:
            return Arrival("backwards", None)
        missing = None
        if step > self.last + 1:
            missing = (self.last + 1, step - 1)
            self.gaps.append(missing)
            if len(self.gaps) > _MAX_GAPS:
                first, last = self.gaps.pop(0)
                self.merged_missing += last - first + 1
        self.last = step
        return Arrival("next" if missing is None else "gap", missing)
