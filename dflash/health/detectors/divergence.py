"""Divergence: a bucket's median has left the best it ever reached, too slowly for any spike or sum to see.

The hard decision: the comparison is with the best median so far and never with a recent one, so no slope is too small;
`divergence_checks` strikes in a row, a quarter of the window apart, keep one unlucky window from being one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from dflash.config import RiseConfig
from dflash.health.baseline import median_of_sorted
from dflash.health.context import RunContext
from dflash.health.detectors.base import Detector, Memory
from dflash.health.lines import StepLine

_CHECKS_PER_WINDOW = 4
_CALM_FRAC = 0.25  # of the rise that is a strike: up to there the bucket counts as where it was


class Track(msgspec.Struct):
    """One bucket: its newest points (logarithms), the best median, strikes, and the last step at which it was calm."""

    values: list[float] = msgspec.field(default_factory=list)
    since_check: int = 0
    best: float | None = None
    strikes: int = 0
    calm_step: int = 0


class DivergenceMemory(Memory):
    """Tracks by bucket."""

    tracks: dict[int, Track] = msgspec.field(default_factory=dict)
    alarm: int | None = None
    diverged: list[int] = msgspec.field(default_factory=list)


class Divergence(Detector):
    """Median loss of a bucket far above the best it reached."""

    name = "divergence"
    follows = True
    domain = "training"
    _memory: DivergenceMemory

    def __init__(self, rise: RiseConfig) -> None:
        super().__init__(DivergenceMemory())
        self._rise = rise
        self._limit = math.log1p(rise.divergence_frac)
        self._every = max(1, rise.divergence_points // _CHECKS_PER_WINDOW)

    def rule(self) -> str:
        """The rule with its thresholds."""
        r = self._rise
        return (
            f"median of a bucket's last {r.divergence_points} points more than {100 * r.divergence_frac:g} % above its best, "
            f"{r.divergence_checks} checks in a row"
        )

    def on_stretch(self, records: Sequence[StepLine], context: RunContext, /) -> int:
        """Judge consecutive records."""
        if context.rebase:
            self._memory.tracks = {}
        tracks, every = self._memory.tracks, self._every
        for record, points in zip(records, context.judged, strict=False):
            for judged in points:
                bucket = judged.batch.bucket
                track = tracks.get(bucket)
                if track is None:
                    track = tracks[bucket] = Track(calm_step=record.step)
                track.values.append(judged.value)
                track.since_check += 1
                if track.since_check >= every:
                    self._check(bucket, track, record=record, context=context)
        return len(records)

    def _check(self, bucket: int, track: Track, *, record: StepLine, context: RunContext) -> None:
        track.since_check = 0
        del track.values[: -self._rise.divergence_points]
        if len(track.values) < self._rise.divergence_points:
            return
        self.checked += 1
        median = median_of_sorted(sorted(track.values))
        best = track.best = median if track.best is None else min(track.best, median)
        rise = median - best
        if rise <= _CALM_FRAC * self._limit:
            track.calm_step = record.step
        track.strikes = track.strikes + 1 if rise > self._limit else 0
        if track.strikes >= self._rise.divergence_checks:
            self._diverged(bucket, track, rise=rise, record=record, context=context)

    def _diverged(self, bucket: int, track: Track, *, rise: float, record: StepLine, context: RunContext) -> None:
        memory = self._memory
        if bucket not in memory.diverged:
            memory.diverged = sorted([*memory.diverged, bucket])
        if memory.alarm is not None:
            self.findings.amend(memory.alarm, last_step=record.step, buckets=list(memory.diverged))
            return
        memory.alarm = self._alarm(
            f"median loss of bucket {bucket} is {100 * math.expm1(rise):.0f} % above the best it reached",
            onset=track.calm_step,
            record=record,
            context=context,
            bucket=None,
            rise_frac=round(math.expm1(rise), 4),
            best=round(math.exp(median_of_sorted(sorted(track.values)) - rise), 5),
            buckets=[bucket],
        )
