"""The mix of buckets: what a pooled rule would cry at, and shares that drift away from the plan.

The hard decision: a record far from the pooled median whose every micro-batch is usual for its own bucket is the mix
at work. It is counted and named, and never acted on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from dflash.config import WatchConfig
from dflash.health.baseline import median_of_sorted
from dflash.health.context import Judged, RunContext
from dflash.health.detectors.base import Detector, Memory
from dflash.health.lines import Count, EventLine, StepLine

_REFRESH_STEPS = 64
_OWN_Z = 4.0
_LEAST_RECORDS = 3
_REFERENCE_WINDOWS = 2


class MixMemory(Memory):
    """Pooled limit (logarithm), levels of the buckets, and how many records the mix explains."""

    since_refresh: int = 0
    newest: list[float] = msgspec.field(default_factory=list)
    limit: float | None = None
    between_frac: float = 0.0
    counts: dict[int, int] = msgspec.field(default_factory=dict)
    first: dict[int, int] = msgspec.field(default_factory=dict)
    findings: dict[int, int] = msgspec.field(default_factory=dict)


class BucketMix(Detector):
    """Records far above the pooled median that are usual for their own bucket."""

    name = "bucket mix"
    follows = True
    domain = "diagnosis"
    _memory: MixMemory

    def __init__(self, watch: WatchConfig) -> None:
        super().__init__(MixMemory())
        self._watch = watch

    def rule(self) -> str:
        """The rule with its thresholds."""
        return (
            f"records over {self._watch.mix_z:g} pooled deviations up whose every micro-batch is within {_OWN_Z:g} deviations of "
            "its own bucket, where more than half of the variance lies between buckets: noted, never acted on"
        )

    def on_stretch(self, records: Sequence[StepLine], context: RunContext, /) -> int:
        """Judge consecutive records."""
        memory, done = self._memory, 0
        seen = [
            (record, points, math.log(ce))
            for record, points in zip(records, context.judged, strict=False)
            if points and (ce := record.ce) is not None and ce > 0.0
        ]
        self.checked += len(seen)
        while done < len(seen):
            until_refresh = seen[done : done + _REFRESH_STEPS - memory.since_refresh]
            done += len(until_refresh)
            memory.newest += [value for _, _, value in until_refresh]
            memory.since_refresh += len(until_refresh)
            if memory.since_refresh >= _REFRESH_STEPS:
                newest = until_refresh.pop()
                self._explain(until_refresh)
                self._refresh(newest[1])
                until_refresh = [newest]
            self._explain(until_refresh)
        return len(records)

    def _explain(self, seen: Sequence[tuple[StepLine, Sequence[Judged], float]]) -> None:
        limit = self._memory.limit
        if limit is not None:
            for record, points, value in seen:
                if value > limit and all(judged.z < _OWN_Z for judged in points):
                    self._explained(record, points)

    def _refresh(self, points: Sequence[Judged]) -> None:
        """The limit of a pooled rule over the newest records, and the share of variance between the buckets."""
        memory = self._memory
        memory.since_refresh = 0
        del memory.newest[: -4 * _REFRESH_STEPS]
        newest = np.array(memory.newest)
        median = _median(newest)
        spread = 1.4826 * _median(np.abs(newest - median))
        within = median_of_sorted(sorted([judged.level.scale for judged in points])) ** 2
        off = newest - np.add.reduce(newest) / len(newest)  # numpy's own variance, without what its generality costs
        total = float(np.add.reduce(off * off) / len(newest))
        memory.between_frac = max(0.0, 1 - within / total) if total else 0.0
        memory.limit = median + self._watch.mix_z * spread if memory.between_frac > 0.5 else None

    def _explained(self, record: StepLine, points: Sequence[Judged]) -> None:
        memory = self._memory
        highest = max(points, key=lambda judged: judged.value)
        bucket = highest.batch.bucket
        memory.counts[bucket] = memory.counts.get(bucket, 0) + 1
        first = memory.first.setdefault(bucket, record.step)
        count = memory.counts[bucket]
        if count < _LEAST_RECORDS:
            return
        usual = math.exp(highest.level.median)
        message = f"bucket {bucket} sits at a loss of {usual:.3g}: {count} records look like spikes to a pooled rule and are not"
        number = memory.findings.get(bucket)
        if number is None:
            memory.findings[bucket] = self._finding(
                "info",
                message,
                steps=(first, first, record.step),
                bucket=bucket,
                records=count,
                usual=usual,
                between_frac=round(memory.between_frac, 3),
            )
        else:
            self.findings.amend(number, last_step=record.step, message=message, records=count)


class ShareMemory(Memory):
    """Shares expected of the buckets, the batches of the window in progress, and drifts that are open."""

    declared: bool = False
    reference: dict[int, float] = msgspec.field(default_factory=dict)
    reference_batches: int = 0
    counts: dict[int, int] = msgspec.field(default_factory=dict)
    batches: int = 0
    first_step: int = 0
    drifts: dict[int, int] = msgspec.field(default_factory=dict)


class ShareDrift(Detector):
    """A bucket that comes more or less often than planned, or than at the run's beginning."""

    name = "share drift"
    domain = "training"
    _memory: ShareMemory

    def __init__(self, watch: WatchConfig) -> None:
        super().__init__(ShareMemory())
        self._watch = watch

    def rule(self) -> str:
        """The rule with its thresholds."""
        w = self._watch
        return (
            f"share of a bucket in {w.share_batches} micro-batches over {w.share_z:g} deviations and {100 * w.share_frac:g} points "
            "off the plan (where the log declares it) or the run's beginning"
        )

    def on_event(self, event: EventLine) -> None:
        """A run may declare its shares (`bucket_shares`: bucket to share)."""
        if "bucket_shares" not in event.details:
            return
        try:
            self._memory.reference = msgspec.convert(event.details["bucket_shares"], dict[Count, float], str_keys=True)
        except msgspec.ValidationError:
            return  # no shares of buckets: it declares nothing
        self._memory.declared = True

    def on_stretch(self, records: Sequence[StepLine], _context: RunContext, /) -> int:
        """Judge consecutive records."""
        memory, size = self._memory, self._watch.share_batches
        counts, batches = memory.counts, memory.batches
        for record in records:
            if not batches:
                memory.first_step = record.step
            for batch in record.micro_batches:
                bucket = batch.bucket
                counts[bucket] = counts.get(bucket, 0) + 1
            batches += len(record.micro_batches)
            if batches >= size:
                memory.batches = batches
                self._window(record)
                counts, batches = memory.counts, memory.batches
        memory.batches = batches
        return len(records)

    def _window(self, record: StepLine) -> None:
        """The window may be full: it becomes what later ones are compared with, or is compared."""
        memory = self._memory
        if memory.declared or memory.reference:
            self._compare(record)
        elif memory.batches >= _REFERENCE_WINDOWS * self._watch.share_batches:
            memory.reference = {bucket: count / memory.batches for bucket, count in memory.counts.items()}
            memory.reference_batches = memory.batches
        else:
            return
        memory.counts, memory.batches = {}, 0

    def _compare(self, record: StepLine) -> None:
        memory, watch = self._memory, self._watch
        n = memory.batches
        self.checked += n
        learnt = memory.reference_batches
        noise = 1 / n + (1 / learnt if learnt else 0.0)
        for bucket in sorted({*memory.reference, *memory.counts}):
            planned, share = memory.reference.get(bucket, 0.0), memory.counts.get(bucket, 0) / n
            # A share learnt from the run is itself uncertain: what both stretches say together (two proportions, pooled).
            usual = (planned * learnt + share * n) / (learnt + n) if learnt else planned
            sd = math.sqrt(max(usual * (1 - usual), 1 / n) * noise)
            off = share - planned
            number = memory.drifts.get(bucket)
            if abs(off) <= watch.share_frac or abs(off) <= watch.share_z * sd:
                if number is not None:
                    self.findings.amend(number, resolved_step=record.step)
                    del memory.drifts[bucket]
            elif number is not None:
                self.findings.amend(number, last_step=record.step)
            else:
                what = "planned" if memory.declared else "at the beginning"
                memory.drifts[bucket] = self._finding(
                    "warn",
                    f"bucket {bucket} makes up {100 * share:.0f} % of the batches from step {memory.first_step}, "
                    f"{100 * planned:.0f} % {what}",
                    steps=(memory.first_step, memory.first_step, record.step),
                    bucket=bucket,
                    share=round(share, 4),
                    reference=round(planned, 4),
                    z=round(off / sd, 2),
                )


def _median(values: npt.NDArray[np.float64]) -> float:
    ordered = np.sort(values)
    middle = len(ordered) // 2
    return float((ordered[middle] + ordered[~middle]) / 2)
