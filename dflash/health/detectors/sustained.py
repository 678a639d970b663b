"""Sustained rise: small deviations of many points that add up, and are still there when looked at again.

A cumulative sum over the micro-batches of all buckets (Page 1954), each in deviations of its own bucket. The reference
is frozen when the sum leaves zero, so that a baseline which follows the damage cannot hide it, and it is the lowest
level of the last refreshes, so that a slow rise cannot drag it along.

The hard decision: the sum only raises a suspicion. Damage is a rise whose newest points are still up `confirm_steps`
after the onset: a spike that decays, or a tenth of the batches being hard, reaches any sum, but not that median.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

from dflash.config import RiseConfig
from dflash.health.baseline import Level
from dflash.health.context import EXPLOSION_LEAD_STEPS, Judged, RunContext
from dflash.health.detectors.base import Detector, Memory
from dflash.health.lines import StepLine

_LEAST_Z = -3.0
_CEILING = 3.0  # times the limit: a sum without a ceiling would take forever to come down
_PATIENCE = 6  # times `confirm_steps`: an older suspicion that was never confirmed is dropped
_PATH_POINTS = 256
_ONSET_Z, _ONSET_CLIP = 1.0, 3.0  # a point this far up speaks for the rise having begun, and none for more than this
_LOW_Z = 0.5  # the lowest three tenths may lie this much lower than the median: hard batches fill a half, not seven tenths
_EARLY_FRAC = 0.35  # of the newest height that was there already then
_EARLY_Z = 1.0  # half of `confirm_steps` back it must have been up already: a fresh spike on a slow swell is none
_STEADY_FRAC = 0.6  # of the newest points, their last third may lie this much lower: a decaying spike falls faster
_MEDIAN_ERROR = 5.6  # three standard errors of a median of one point, in median deviations
_HOLDS_FRAC = 0.35  # of its median height since the onset: under that it is on its way back


class RisenPoint(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A point since the sum left zero."""

    step: int
    z: float
    rise: float


class SustainedMemory(Memory):
    """The sum, the references it is taken against, and the points since it left zero."""

    score: float = 0.0
    references: dict[int, Level] = msgspec.field(default_factory=dict)
    path: list[RisenPoint] = msgspec.field(default_factory=list)
    first_step: int = 0
    alarm: int | None = None


class SustainedRise(Detector):
    """Loss that rises and stays up, in all buckets together."""

    name = "sustained rise"
    follows = True
    domain = "training"
    _memory: SustainedMemory

    def __init__(self, rise: RiseConfig) -> None:
        super().__init__(SustainedMemory())
        self._rise = rise
        self._least_rise = math.log1p(rise.min_rise_frac)

    def rule(self) -> str:
        """The rule with its thresholds."""
        r = self._rise
        return (
            f"sum of (clipped deviation - {r.cusum_drift:g}) over all buckets above {r.cusum_limit:g}, and {r.confirm_steps} steps "
            f"after the onset the median of the newest {r.confirm_points} points still {r.confirm_z:g} deviations and "
            f"{100 * r.min_rise_frac:g} % up"
        )

    def may_explain(self, context: RunContext, *, from_step: int) -> bool:
        """Whether a declared change lies so near that a rise at `from_step` or later may be found to come from it."""
        reach_steps = _PATIENCE * self._rise.confirm_steps + EXPLOSION_LEAD_STEPS + self._rise.planned_steps
        return any(change >= from_step - reach_steps for change, _ in context.planned)

    def on_stretch(self, records: Sequence[StepLine], context: RunContext, /) -> int:
        """Judge consecutive records."""
        memory, drift = self._memory, self._rise.cusum_drift
        for record, points in zip(records, context.judged, strict=False):
            self.checked += len(points)
            for judged in points:
                if memory.score == 0.0 and (judged.value - judged.level.lowest) / judged.scale <= drift:
                    continue  # the sum stays where it is, at zero
                self._add(judged, record.step)
            if memory.score > 0.0:
                self._look_at_sum(record, context)
        return len(records)

    def _look_at_sum(self, record: StepLine, context: RunContext) -> None:
        memory, rise = self._memory, self._rise
        if memory.alarm is None and record.step - memory.first_step > _PATIENCE * rise.confirm_steps:
            self._reset(record.step)  # a reference frozen on an unlucky low: what rises slower than this is divergence
        elif memory.score > rise.cusum_limit and len(memory.path) >= rise.confirm_points:
            self._confirm(record, context)

    def _add(self, judged: Judged, step: int) -> None:
        memory, rise = self._memory, self._rise
        level = memory.references.get(judged.batch.bucket, judged.level)
        z = (judged.value - level.lowest) / level.scale_for(judged.batch.n_tokens)
        clipped = z if _LEAST_Z < z < rise.cusum_clip else min(max(z, _LEAST_Z), rise.cusum_clip)
        score = memory.score + clipped - rise.cusum_drift
        if score <= 0.0:
            if memory.score > 0.0:
                self._reset(step)
            return
        if memory.score == 0.0:
            memory.first_step = step
        memory.score = min(score, _CEILING * rise.cusum_limit)
        memory.references[judged.batch.bucket] = level
        memory.path.append(RisenPoint(step, z, judged.value - level.median))
        if len(memory.path) > _PATH_POINTS:
            del memory.path[: _PATH_POINTS // 4]

    def _reset(self, step: int) -> None:
        memory = self._memory
        memory.score = 0.0
        memory.references, memory.path = {}, []
        if memory.alarm is not None:
            self.findings.amend(memory.alarm, back_step=step)
            memory.alarm = None

    def _confirm(self, record: StepLine, context: RunContext) -> None:
        memory, rise = self._memory, self._rise
        if memory.alarm is not None:
            self.findings.amend(memory.alarm, last_step=record.step)
            return
        onset = context.led_from(self._onset(), rise.confirm_grad_z, step=record.step)
        if record.step - onset < rise.confirm_steps:
            return
        newest = memory.path[-rise.confirm_points :]
        z = statistics.median(point.z for point in newest)
        up = statistics.median(point.rise for point in newest)
        if statistics.median(point.rise for point in newest[-len(newest) // 3 :]) < _STEADY_FRAC * up:
            return
        early = [p for p in memory.path if record.step - rise.confirm_steps <= p.step <= record.step - rise.confirm_steps // 2]
        if not early or statistics.median(point.z for point in early) < _EARLY_Z:
            return
        if statistics.median(point.rise for point in early) < max(_EARLY_FRAC * up, self._least_rise / 2):
            return
        since = [point.rise for point in memory.path if point.step >= onset]
        low = sorted(point.z for point in newest)[len(newest) * 3 // 10]
        if min(z, low + _LOW_Z) < rise.confirm_z or up < self._least_rise or up < _HOLDS_FRAC * statistics.median(since):
            return
        near = context.planned_near(onset, steps=rise.planned_steps)
        planned = near or self._planned_inside(context)
        if planned is not None:
            if near is None and record.step - planned[0] < rise.confirm_steps // 2:
                return  # too soon to see where it settles
            if self._is_settled(up, [point.rise for point in memory.path if point.step >= planned[0]]):
                self._explain(planned, onset=onset, up=up, record=record, context=context)
                return
        memory.alarm = self._alarm(
            f"loss has risen by {100 * math.expm1(up):.0f} % since step {onset} and stays up",
            onset=onset,
            record=record,
            context=context,
            bucket=None,
            z=round(z, 2),
            rise_frac=round(math.expm1(up), 4),
            cusum=round(memory.score, 2),
            suspected_since=memory.first_step,
            buckets=sorted(memory.references),
        )

    def _onset(self) -> int:
        """Where the points begin to speak for a rise: the start that gives the largest sum up to now (maximum likelihood)."""
        best, total, onset = -math.inf, 0.0, self._memory.first_step
        for point in reversed(self._memory.path):
            total += min(max(point.z, _LEAST_Z), _ONSET_CLIP) - _ONSET_Z
            if total >= best:
                best, onset = total, point.step
        return onset

    def _planned_inside(self, context: RunContext) -> tuple[int, str] | None:
        """A declared change from the sum's beginning on that may have made the rise: noise dates the onset far off it."""
        path, rise = self._memory.path, self._rise
        for change in reversed(context.planned):
            if change[0] < self._memory.first_step - rise.planned_steps:
                break
            before = [point.rise for point in path if point.step < change[0]]
            if len(before) < len(path):
                risen = len(before) >= rise.alone_points and statistics.median(before) >= self._least_rise
                return None if risen else change
        return None

    def _is_settled(self, up: float, since: Sequence[float]) -> bool:
        """Whether the rise stands where it was half way, as far as the noise tells, and is no larger than a change may make it."""
        first = since[: max(len(since) // 2, 1)]
        half, middle = statistics.median(first), statistics.median(since)
        error = math.sqrt(1 / len(first) + 1 / self._rise.confirm_points)
        noise = _MEDIAN_ERROR * statistics.median(abs(value - middle) for value in since) * error
        near = max(0.3 * up, self._least_rise / 2, noise)
        return up < math.log1p(self._rise.planned_max_frac) and abs(up - half) < near

    def _explain(self, planned: tuple[int, str], *, onset: int, up: float, record: StepLine, context: RunContext) -> None:
        """A declared change moved the loss once: note it, and learn the new level."""
        step, event = planned
        self._finding(
            "info",
            f"loss has settled {100 * math.expm1(up):.0f} % higher since the declared change ({event}) at step {step}",
            steps=(onset, onset, record.step),
            planned_event=event,
            planned_step=step,
            rise_frac=round(math.expm1(up), 4),
        )
        self._reset(record.step)
        context.rebase = True
