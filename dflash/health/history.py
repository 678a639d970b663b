"""Curves for the report, thinned to a bounded number of points.

Invariant: which points are kept depends on the records alone, never on how the log was cut into readings: every
`stride`-th record of a series, or the highest of as many records where the peak is what matters; the stride doubles
whenever the series is full.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from dflash.health.baseline import Level
from dflash.health.lines import EventLine, StepLine

KeyT = TypeVar("KeyT")
MAX_POINTS = 300
MAX_PEAKS = 160
MAX_SAVES = 256
_NO_BAND: tuple[float | None, float | None] = (None, None)
_SAVE_ENDED = frozenset({"save_durable", "save_failed", "save_skipped"})


class Point(msgspec.Struct, frozen=True, array_like=True, gc=False):
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

    def next_of(self, count: int) -> Iterator[int]:
        """Count the next records of the series; gives the numbers (from 0) of those whose points are to be kept, one by one."""
        first, number = self.seen, 0
        self.seen += count
        while (number := number + -(first + number) % self.stride) < count:
            yield number
            number += 1  # keeping that one may have doubled the stride

    def keep(self, step: int, value: float, *, band: tuple[float | None, float | None]) -> None:
        """Keep a point that was wanted, to as many digits as a picture shows."""
        usual, limit = band
        self.add(Point(step, _rounded(value), usual and _rounded(usual), limit and _rounded(limit)))

    def add(self, point: Point) -> None:
        """Add a point that has no more digits than that."""
        self.points.append(point)
        if len(self.points) > MAX_POINTS:
            self.points = self.points[::2]
            self.stride *= 2

    def rewind(self, step: int) -> None:
        """Forget the points from `step` on."""
        while self.points and self.points[-1].step >= step:
            self.points.pop()


class Peak(msgspec.Struct, array_like=True, gc=False):
    """The highest value of a stretch of records: where the stretch begins, the value, and what it belongs to."""

    step: int
    value: float
    tag: int


class Peaks(msgspec.Struct):
    """One series as the highest value of each stretch of `stride` records."""

    stretches: list[Peak] = msgspec.field(default_factory=list)
    stride: int = 1
    in_last: int = 0

    def see(self, points: Iterable[tuple[int, float, int]]) -> None:
        """Count the next records of the series: (step, value, tag)."""
        newest, in_last = self.stretches[-1] if self.stretches else None, self.in_last
        for step, value, tag in points:
            if newest is None or in_last >= self.stride:
                newest, in_last = Peak(step, value, tag), 0
                self._begin(newest)
            elif value > newest.value:
                newest.value, newest.tag = value, tag
            in_last += 1
        self.in_last = in_last

    def _begin(self, peak: Peak) -> None:
        if len(self.stretches) >= MAX_PEAKS:
            pairs = zip(self.stretches[::2], self.stretches[1::2], strict=True)
            self.stretches = [Peak(a.step, max(a.value, b.value), a.tag if a.value >= b.value else b.tag) for a, b in pairs]
            self.stride *= 2
        self.stretches.append(peak)

    def rewind(self, step: int) -> None:
        """Forget the stretches from `step` on."""
        while self.stretches and self.stretches[-1].step >= step:
            self.stretches.pop()
            self.in_last = self.stride


class Save(msgspec.Struct, array_like=True):
    """A save: the step it began at, and the newest step when it ended (None while it is under way)."""

    step: int
    end: int | None


class Probe(msgspec.Struct, array_like=True):
    """An acceptance probe: the step of its checkpoint, its acceptance length, and the interval of that, None of a single prompt."""

    step: int
    length: float
    low: float | None
    high: float | None


class History(msgspec.Struct):
    """What the pictures show.

    Attributes:
        loss: by bucket; grad_norm: by composition of the update.
        queues: depth by stage; targets: by worker, batches ahead of (or behind) the mean of all.
        step_time: seconds; runs: length of the run of one bucket that a step is part of, tagged with the bucket.
        saves: oldest first; probes: with figures, by step.
        run_bucket, run_length: of the run in progress; last_step: newest record.
    """

    loss: dict[int, Curve] = msgspec.field(default_factory=dict)
    grad_norm: dict[str, Curve] = msgspec.field(default_factory=dict)
    queues: dict[str, Curve] = msgspec.field(default_factory=dict)
    targets: dict[int, Curve] = msgspec.field(default_factory=dict)
    step_time: Peaks = msgspec.field(default_factory=Peaks)
    runs: Peaks = msgspec.field(default_factory=Peaks)
    saves: list[Save] = msgspec.field(default_factory=list)
    probes: list[Probe] = msgspec.field(default_factory=list)
    run_bucket: int | None = None
    run_length: int = 0
    last_step: int = 0

    def see_stretch(self, records: Sequence[StepLine]) -> None:
        """Remember of consecutive records what does not belong to a bucket's own curve."""
        self.last_step = records[-1].step
        ready = self.queues.get("ready")
        if ready is None:
            ready = self.queues["ready"] = Curve()
        self.step_time.see([(record.step, record.step_time_s, 0) for record in records])
        bucket, length, runs = self.run_bucket, self.run_length, []
        for record in records:
            for batch in record.micro_batches:
                length = length + 1 if batch.bucket == bucket else 1
                bucket = batch.bucket
                runs.append((record.step, length, bucket))
        self.runs.see(runs)
        self.run_bucket, self.run_length = bucket, length
        for number in ready.next_of(len(records)):  # one count for all: they have a value in every record
            self._keep_depths(records[number].step, records[number])

    def _keep_depths(self, step: int, record: StepLine) -> None:
        for name, depth in (("ready", record.ready_depth), ("features", record.feature_depth)):
            self.queues.setdefault(name, Curve()).keep(step, depth, band=_NO_BAND)
        if len(record.target_depths) > 1:
            mean = sum(record.target_depths) / len(record.target_depths)
            for target, done in enumerate(record.target_depths):
                self.targets.setdefault(target, Curve()).keep(step, done - mean, band=_NO_BAND)

    def see_event(self, event: EventLine) -> None:
        """Remember when saves began and ended, and what probes measured."""
        if event.event == "save_begin":
            self.saves = [*self.saves[1 - MAX_SAVES :], Save(event.step, None)]
        elif event.event in _SAVE_ENDED:
            for save in self.saves:
                if save.step == event.step and save.end is None:
                    save.end = max(self.last_step, event.step)
        elif event.event == "acceptance_probe" and "acceptance_length" in event.details:
            self._see_probe(event)

    def _see_probe(self, event: EventLine) -> None:
        length, ends = event.details["acceptance_length"], event.details.get("acceptance_ci")
        low, high = ends if isinstance(ends, list) and len(ends) == 2 else (None, None)
        try:
            probe = msgspec.convert((event.step, length, low, high), Probe)
        except msgspec.ValidationError:
            return  # no figures, like any other unknown detail
        probes = sorted([*[each for each in self.probes if each.step != probe.step], probe], key=lambda each: each.step)
        self.probes = probes if len(probes) <= MAX_POINTS else probes[:-2:2] + probes[-2:]

    def rewind(self, step: int) -> None:
        """Forget everything from `step` on."""
        for curve in (*self.loss.values(), *self.grad_norm.values(), *self.queues.values(), *self.targets.values()):
            curve.rewind(step)
        for peaks in (self.step_time, self.runs):
            peaks.rewind(step)
        self.saves = [save for save in self.saves if save.step < step]
        self.probes = [probe for probe in self.probes if probe.step <= step]  # a run goes on from the checkpoint of `step`
        self.run_bucket, self.run_length = None, 0


def keep_points(curves: dict[KeyT, Curve], points: Sequence[tuple[KeyT, int, float, Level | None]], *, limit_z: float) -> None:
    """Keep points of several curves.

    Args:
        curves: by key.
        points: (key, step, value, level of the baseline behind it) in order.
        limit_z: deviations above the usual value where the limit lies.
    """
    of_key: dict[KeyT, list[tuple[KeyT, int, float, Level | None]]] = {}
    for point in points:
        of_key.setdefault(point[0], []).append(point)
    for key, own in of_key.items():
        curve = curves.get(key)
        if curve is None:
            curve = curves[key] = Curve()
        drawn, band = None, _NO_BAND
        for number in curve.next_of(len(own)):
            _, step, value, level = own[number]
            if level is not drawn:  # several points share a level
                drawn, band = level, _NO_BAND if level is None else _rounded_band(*level.band(limit_z))
            curve.add(Point(step, _rounded(value), *band))


def _rounded_band(usual: float, limit: float) -> tuple[float, float]:
    return _rounded(usual), _rounded(limit)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
