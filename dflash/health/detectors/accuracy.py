"""Accuracy drops: hits of a micro-batch against what its bucket usually hits, as a binomial expects them to scatter.

The hard decision: the scatter is the larger of the binomial one and the bucket's own, because hits inside a batch are
not independent; and a batch of which hardly any hit was expected says nothing by having none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from dflash.config import WatchConfig
from dflash.health.context import RunContext
from dflash.health.detectors.base import Detector, Memory
from dflash.health.lines import MicroBatchLine, StepLine

_LEARN_POINTS = 24
_PACE = 1 / 32  # share of a new point in mean and deviation
_CLIP_SD = 2.5
_DEVIATION_TO_SD = 1.2533  # sqrt(pi / 2)
_LEAST_SD = 0.005
_CHANCE = 1e-5
_PRIOR_POINTS = 50


class Usual(msgspec.Struct):
    """What a bucket usually hits: mean share and mean absolute deviation, and its drops in a row."""

    mean: float = 0.0
    deviation: float = 0.0
    points: int = 0
    drops: int = 0
    in_row: int = 0
    first_step: int = 0
    batch_ids: list[int] = msgspec.field(default_factory=list)
    finding: int | None = None


class AccuracyMemory(Memory):
    """Usual accuracy by bucket, and batches that hit far less."""

    buckets: dict[int, Usual] = msgspec.field(default_factory=dict)
    drops: int = 0


class AccuracyDrop(Detector):
    """Hits far under what the bucket usually has, several times in a row."""

    name = "accuracy drop"
    follows = True
    domain = "training"
    _memory: AccuracyMemory

    def __init__(self, watch: WatchConfig) -> None:
        super().__init__(AccuracyMemory())
        self._watch = watch
        self._near_sd = min(_CLIP_SD, 0.99 * watch.accuracy_z)

    def rule(self) -> str:
        """The rule with its thresholds."""
        w = self._watch
        return (
            f"hits more than {w.accuracy_z:g} deviations under the bucket's usual share, or none of at least "
            f"{w.accuracy_expected:g} expected, {w.accuracy_in_row} times in a row in one bucket and "
            "oftener than its own single ones would by chance; damage only if the loss says so"
        )

    def on_stretch(self, records: Sequence[StepLine], context: RunContext, /) -> int:
        """Judge consecutive records."""
        buckets, watch = self._memory.buckets, self._watch
        for record in records:
            for batch in record.micro_batches:
                valid = sum(batch.valid)
                if not valid:
                    continue
                hits = sum(batch.correct)
                share = hits / valid
                usual = buckets.get(batch.bucket)
                if usual is None or usual.points < _LEARN_POINTS:
                    self._learn(batch.bucket, share)
                    continue
                self.checked += 1
                usual.points += 1
                off = share - usual.mean
                # Nearly always: no drop, and not even clipped, by the smallest that the scatter can be.
                if not hits or usual.in_row or abs(off) > self._near_sd * (_DEVIATION_TO_SD * usual.deviation):
                    sd = _sd_of(usual, valid)
                    if off / sd < -watch.accuracy_z or (hits == 0 and usual.mean * valid >= watch.accuracy_expected):
                        self._drop(batch, usual, z=off / sd, share=share, record=record, context=context)
                        continue  # a collapse must not become usual
                    if usual.in_row:
                        self._back(usual, record.step)
                    off = min(max(off, -_CLIP_SD * sd), _CLIP_SD * sd)
                usual.mean += _PACE * off
                usual.deviation += _PACE * (abs(off) - usual.deviation)
        return len(records)

    def _learn(self, bucket: int, share: float) -> None:
        usual = self._memory.buckets.setdefault(bucket, Usual())
        usual.points += 1
        usual.mean += (share - usual.mean) / usual.points
        usual.deviation += (abs(share - usual.mean) - usual.deviation) / usual.points

    def _drop(self, batch: MicroBatchLine, usual: Usual, *, z: float, share: float, record: StepLine, context: RunContext) -> None:
        if not usual.in_row:
            usual.first_step, usual.batch_ids = record.step, []
        usual.in_row += 1
        usual.drops += 1
        self._memory.drops += 1
        if len(usual.batch_ids) < _LEARN_POINTS:
            usual.batch_ids.append(batch.batch_id)
        if usual.finding is not None:
            self.findings.amend(usual.finding, last_step=record.step, batches=usual.in_row)
        elif usual.in_row >= self._watch.accuracy_in_row and self._is_rare(usual):
            usual.finding = self._finding(
                "warn",
                f"accuracy of bucket {batch.bucket} falls from {usual.mean:.3f} to {share:.3f} at step {usual.first_step}",
                steps=(usual.first_step, usual.first_step, record.step),
                bucket=batch.bucket,
                batch_ids=tuple(usual.batch_ids),
                z=round(z, 2),
                accuracy=share,
                usual=usual.mean,
                batches=usual.in_row,
                loss_spikes_open=context.loss_spikes_open_at(record.step),
            )

    def _is_rare(self, usual: Usual) -> bool:
        """Whether so many in a row are rarer than chance at the bucket's own rate of single ones; a young bucket has the run's."""
        in_row = usual.in_row
        pooled = (self._memory.drops - in_row + 1) / (self.checked + 100)
        rate = (usual.drops - in_row + 1 + _PRIOR_POINTS * pooled) / (usual.points + _PRIOR_POINTS)
        return self.checked * min(max(rate, pooled), 1.0) ** in_row < _CHANCE

    def _back(self, usual: Usual, step: int) -> None:
        if usual.finding is not None:
            self.findings.amend(usual.finding, resolved_step=step)
        usual.in_row, usual.finding = 0, None


def _sd_of(usual: Usual, valid: int) -> float:
    """Scatter expected of a share of `valid` slots: the larger of the bucket's own and the binomial one."""
    own, spread = _DEVIATION_TO_SD * usual.deviation, usual.mean * (1 - usual.mean)
    binomial = math.sqrt(spread / valid) if spread > 0.0 else 0.0
    return max(own, binomial, _LEAST_SD)
