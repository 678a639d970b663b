"""Gradient spikes: the norm before clipping, against updates of the same bucket.

The hard decision: a gradient spike alone is never critical. Real drafter runs show dozens of outliers of up to 17
times the usual norm that clipping absorbs; what counts is whether the loss follows, and that is the loss detector's
to say. An outlier is settled once `cluster_steps` have gone by and no loss spike is open.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import msgspec

from dflash.config import SpikeConfig
from dflash.health.baseline import Baseline, Level
from dflash.health.context import RecentStep, RunContext
from dflash.health.detectors.base import Detector, Memory
from dflash.health.lines import StepLine
from dflash.health.tail import FROM_Z, Tail

MIXED = "mixed"  # an update whose micro-batches come from several buckets
_TINY = 1e-30
_LOG_TINY = math.log(_TINY)
_Z_LIMIT = 1e6  # infinity has no JSON form


class GradSpikeMemory(Memory):
    """Baselines by composition of the update, and the burst of outliers that may still grow."""

    baselines: dict[str, Baseline] = msgspec.field(default_factory=dict)
    open_burst: int | None = None
    burst_first: int = 0
    burst_last: int = 0
    burst_size: int = 0
    burst_worst: float = 0.0
    burst_loud: bool = False
    tail: Tail = msgspec.field(default_factory=Tail)
    last: float | None = None


class GradSpike(Detector):
    """Gradient norm far above its bucket's median.

    Attributes:
        drawn: (composition, step, norm, level of the baseline behind it) of the records judged last, for the curves.
    """

    name = "gradient spike"
    domain = "training"
    _memory: GradSpikeMemory

    def __init__(self, spike: SpikeConfig) -> None:
        super().__init__(GradSpikeMemory())
        self._easy_z = min(FROM_Z, spike.loss_z_with_grad, spike.grad_z)  # lower norms need no second look
        self.drawn: list[tuple[str, int, float, Level | None]] = []
        self._spike = spike
        self._log_factor, self._least_factor = math.log(spike.grad_factor), math.log(spike.grad_least_factor)

    def rule(self) -> str:
        """The rule with its thresholds."""
        return (
            f"log gradient norm more than {self._spike.grad_z:g} deviations above its bucket's median, or over "
            f"{self._spike.grad_factor:g}x of it; a warning (noted only where this run's own noise reaches that far), "
            f"settled when {self._spike.cluster_steps} steps later no loss spike is open"
        )

    def note(self) -> str:
        """What limits or explains this check."""
        waiting = [key for key, baseline in self._memory.baselines.items() if baseline.level is None]
        return f"still learning: bucket {', '.join(sorted(waiting))}" if waiting else ""

    def usual_and_limit(self, key: str) -> tuple[float | None, float | None]:
        """(median, spike limit) of the gradient norm of updates of one composition; None during its warm-up."""
        baseline = self._memory.baselines.get(key)
        level = baseline.level if baseline is not None else None
        return (None, None) if level is None else level.band(self._spike.grad_z)

    def on_stretch(self, records: Sequence[StepLine], context: RunContext, /) -> int:
        """Judge the first records: up to one that begins a burst, and one at a time while it lasts.

        Whether a burst is over depends on what the loss has done by the step before.
        """
        memory = self._memory
        if memory.open_burst is not None:
            self._settle(records[0].step, context)
            if memory.open_burst is not None:
                records = records[:1]
        self.drawn = []
        recent, place = context.recent, context.place_of(records[0].step)
        for number, record in enumerate(records):
            if record.grad_norm is None:
                if record.nonfinite:
                    recent[place + number].stands_out(_Z_LIMIT, chance=0.0)
            elif number and not context.gradients:
                return number  # the loss of the records before this one is judged without
            else:
                context.gradients = True
                self._see_norm(record, record.grad_norm, seen=recent[place + number])
                if memory.open_burst is not None:
                    return number + 1
        return len(records)

    def _see_norm(self, record: StepLine, norm: float, *, seen: RecentStep) -> None:
        memory, key = self._memory, composition(record)
        frozen, memory.last = norm == memory.last, norm
        if key is None:
            return
        baseline = memory.baselines.get(key)
        level = None if baseline is None else baseline.level
        # A metric that stands still is dead, and no level to measure others from.
        if norm != 0.0 and (level is None or not frozen):
            if baseline is None:
                baseline = memory.baselines[key] = self._new_baseline()
            value = math.log(norm) if norm > _TINY else _LOG_TINY
            if level is not None:
                self.checked += 1
                up = value - level.median
                z = up / level.scale
                if z <= self._easy_z and up <= self._log_factor:  # nearly always
                    seen.grad_z = math.floor(z * 1000.0 + 0.5) / 1000.0
                    memory.tail.points += 1
                else:
                    self._judge(record, key, min(z, _Z_LIMIT), up=up, usual=math.exp(level.median), seen=seen)
            baseline.accept(value, 1)
            level = baseline.level
        self.drawn.append((key, record.step, norm, level))

    def _new_baseline(self) -> Baseline:
        return Baseline(
            capacity=self._spike.baseline_points,
            min_points=self._spike.min_points,
            newest=self._spike.level_points,
            floor=self._spike.grad_floor,
            winsor_z=self._spike.grad_z,
        )

    def _judge(self, record: StepLine, key: str, z: float, *, up: float, usual: float, seen: RecentStep) -> None:
        """Judge a norm that is not low; `up` is the logarithm of how many times the usual one it is."""
        spike, tail = self._spike, self._memory.tail
        seen.stands_out(z, chance=tail.chance(z, step=record.step) if z > spike.loss_z_with_grad else None)
        loud = False
        if z > spike.grad_z or up > self._log_factor:
            loud = not self._is_usual(z, up, step=record.step)
            self._outlier(record, key, z=z, usual=usual, loud=loud)
        tail.see(z, step=record.step, loud=loud)

    def _is_usual(self, z: float, log_factor: float, *, step: int) -> bool:
        """Whether the run's own noise reaches that far, or the norm is not even far above the usual one."""
        if log_factor < self._least_factor:
            return True
        return log_factor < self._log_factor and self._memory.tail.chance(z, step=step) > self._spike.grad_usual_p

    def _outlier(self, record: StepLine, key: str, *, z: float, usual: float, loud: bool) -> None:
        memory = self._memory
        norm = record.grad_norm or 0.0
        if memory.open_burst is not None and loud and not memory.burst_loud:
            self.findings.amend(memory.open_burst, resolved_step=record.step)
            memory.open_burst = None
        if memory.open_burst is not None:
            memory.burst_last = record.step
            memory.burst_size += 1
            memory.burst_worst = max(memory.burst_worst, z)
            self.findings.amend(
                memory.open_burst, last_step=record.step, outliers=memory.burst_size, worst_z=round(memory.burst_worst, 2)
            )
            return
        memory.burst_first = memory.burst_last = record.step
        memory.burst_size, memory.burst_worst, memory.burst_loud = 1, z, loud
        memory.open_burst = self._finding(
            "warn" if loud else "info",
            f"gradient norm {norm:.3g} at step {record.step}, {norm / usual:.1f}x the usual {usual:.3g} of bucket {key}"
            + (", as this run's own noise has it now and then" if not loud else ""),
            steps=(record.step, record.step, record.step),
            bucket=None if key == MIXED else int(key),
            batch_ids=tuple(batch.batch_id for batch in record.micro_batches),
            grad_norm=norm,
            usual=usual,
            z=round(z, 2),
            outliers=1,
            tail_chance=float(f"{memory.tail.chance(z, step=record.step):.3g}"),
        )

    def _settle(self, step: int, context: RunContext) -> None:
        memory = self._memory
        if memory.open_burst is None or step - memory.burst_last <= self._spike.cluster_steps or context.open_loss_spikes:
            return
        followed = context.last_loss_spike is not None and context.last_loss_spike >= memory.burst_first
        self.findings.amend(memory.open_burst, resolved_step=step, loss_spike_step=context.last_loss_spike if followed else None)
        memory.open_burst = None


@cache
def bucket_key(bucket: int) -> str:
    """Name of the baseline of updates of one bucket."""
    return str(bucket)


def composition(record: StepLine) -> str | None:
    """Which baseline an update's gradient norm belongs to: its bucket, or `mixed`; None for an update of nothing."""
    batches = record.micro_batches
    if len(batches) == 1:
        return bucket_key(batches[0].bucket)
    buckets = {batch.bucket for batch in batches}
    if not buckets:
        return None
    return str(buckets.pop()) if len(buckets) == 1 else MIXED
