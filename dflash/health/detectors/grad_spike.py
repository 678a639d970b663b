"""Gradient spikes: the norm before clipping, against updates of the same bucket.

The hard decision: a gradient spike alone is never critical. Real drafter runs show dozens of outliers of up to 17
times the usual norm that clipping absorbs; what counts is whether the loss follows, and that is the loss detector's
to say. An outlier is settled once `cluster_steps` have gone by and no loss spike is open.
"""

from __future__ import annotations

import math
from functools import cache

import msgspec

from dflash.config import SpikeConfig
from dflash.health.baseline import Baseline
from dflash.health.context import RunContext
from dflash.health.detectors.base import Detector, Memory
from dflash.health.lines import StepLine
from dflash.health.tail import FROM_Z, Tail

MIXED = "mixed"  # an update whose micro-batches come from several buckets
_TINY = 1e-30
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
    """Gradient norm far above its bucket's median."""

    name = "gradient spike"
    domain = "training"
    _memory: GradSpikeMemory

    def __init__(self, spike: SpikeConfig) -> None:
        super().__init__(GradSpikeMemory())
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

    def on_step(self, record: StepLine, context: RunContext, /) -> None:
        """Judge a live step record."""
        memory, norm = self._memory, record.grad_norm
        if memory.open_burst is not None:
            self._settle(record.step, context)
        if norm is None:
            if record.nonfinite:
                context.set_grad_z(_Z_LIMIT, chance=0.0)
            return
        context.gradients = True
        key = composition(record)
        frozen, memory.last = norm == memory.last, norm
        if key is None or norm == 0.0:
            return
        baseline = memory.baselines.get(key)
        if baseline is None:
            baseline = memory.baselines[key] = Baseline(
                capacity=self._spike.baseline_points,
                min_points=self._spike.min_points,
                newest=self._spike.level_points,
                floor=self._spike.grad_floor,
                winsor_z=self._spike.grad_z,
            )
        value = math.log(max(_TINY, norm))
        level = baseline.level
        if frozen and level is not None:  # a metric that stands still is dead, and no level to measure others from
            return
        if level is not None:
            self.checked += 1
            up = value - level.median
            z, spike = up / level.scale, self._spike
            z = min(z, _Z_LIMIT)
            context.set_grad_z(z, chance=memory.tail.chance(z, step=record.step) if z > spike.loss_z_with_grad else None)
            if z > spike.grad_z or up > self._log_factor:
                loud = not self._is_usual(z, up, step=record.step)
                self._outlier(record, key, z=z, usual=math.exp(level.median), loud=loud)
                memory.tail.see(z, step=record.step, loud=loud)
            elif z > FROM_Z:
                memory.tail.see(z, step=record.step, loud=False)
            else:
                memory.tail.points += 1
        baseline.accept(value, 1)

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
