"""Loss spikes per bucket, and whether the run comes back from them.

Three levels of one story: a micro-batch far above its own bucket (warning); the bucket does not come back under
`recover_z` within `recover_steps` (critical); `cluster_spikes` separate spikes within `cluster_steps` (critical).

Three hard decisions. A spike that decays slowly through all buckets is one spike: another is counted only if
`recover_points` calm points in a row lie between. A cluster is damage only if it is rarer than chance at the run's own rate
of spikes, anywhere in the run so far: a bucket that mixes easy with hard batches throws a spike now and then all its
life, and what it has shown from its warm-up on is noted, not warned of; but three that are only rare, and each too usual
to be warned of, are no chance together. And a bucket that stays up is damage only after
`alone_points` raised points in a row, because three hard batches in a row are no rarity among a million.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from dflash.config import RiseConfig, SpikeConfig
from dflash.health.baseline import Baseline, Level
from dflash.health.context import GRAD_LEAD_STEPS, Judged, RunContext
from dflash.health.detectors.base import Detector, Memory
from dflash.health.lines import StepLine
from dflash.health.seen import MAX_SAMPLE
from dflash.health.tail import FROM_Z, Tail
from dflash.health.trend import binomial_tail

_TINY = 1e-30
_LOG_TINY = math.log(_TINY)
_MAX_IDS = 64
_PRIOR_SPIKES, _PRIOR_POINTS = 0.5, 100.0  # a young run's rate of spikes
_MAX_ROWS = 64
_YOUNG_POINTS = 1000  # until then the tail is little known, and its chances are believed less
_LEAST_RATE = 1e-6
_ALONE_FACTOR = 10.0  # a log without gradients has half the evidence, and never a second witness: its loss is believed sooner
_COMMON_CHANCE = 1e-2  # hard batches that come this often neither end nor prolong what lies around them
_RARE_CHANCE = 1e-3  # a spike that is only noted counts in a cluster if it is rarer than this ...
_NOTED_SHARE = 1e-2  # ... and such a cluster has to be so much rarer than one of warnings
_CALM = (False, False, 1.0)


class OpenSpike(msgspec.Struct):
    """A bucket that has not come back; while it is open, its baseline accepts nothing, so it cannot adapt to the damage.

    Attributes:
        step: of the spike.
        onset: since when the run, in any bucket, had not been calm.
        points: later points of the bucket in a row that were not calm.
        batch_ids: micro-batches that stood out.
    """

    step: int
    onset: int
    finding: int
    points: int
    damage: bool
    is_usual: bool
    batch_ids: list[int]


class Onset(msgspec.Struct, frozen=True):
    """One separate spike, how much had been judged before it, and the chance of one so high by this run's own noise."""

    step: int
    judged_before: int
    chance: float
    loud: bool


class LossSpikeMemory(Memory):
    """Baselines and open spikes by bucket, recent separate spikes, and the cluster that may still grow."""

    baselines: dict[int, Baseline] = msgspec.field(default_factory=dict)
    open: dict[int, OpenSpike] = msgspec.field(default_factory=dict)
    recent: list[Onset] = msgspec.field(default_factory=list)
    spikes: int = 0
    calm_in_row: int = 0
    uneasy_since: int | None = None
    rested: bool = True
    cluster: int | None = None
    unrecovered: int | None = None
    damaged: list[int] = msgspec.field(default_factory=list)
    damage_step: int = 0
    usual_clusters: int = 0
    usual_spikes: int = 0
    points: int = 0
    tail: Tail = msgspec.field(default_factory=Tail)


class LossSpike(Detector):
    """Cross-entropy of a micro-batch far above its bucket's median.

    Attributes:
        drawn: (bucket, step, loss, level of the baseline behind it) of the micro-batches judged last, for the curves.
    """

    name = "loss spike"
    domain = "training"
    _memory: LossSpikeMemory

    def __init__(self, spike: SpikeConfig, rise: RiseConfig) -> None:
        super().__init__(LossSpikeMemory())
        self._spike, self._rise = spike, rise
        self._least_rise = math.log1p(rise.min_rise_frac)
        self._easy_z = min(spike.recover_z, FROM_Z)  # lower points need no second look
        self.drawn: list[tuple[int, int, float, Level | None]] = []

    def rule(self) -> str:
        """The rule with its thresholds."""
        s = self._spike
        return (
            f"log loss more than {s.loss_z:g} deviations above its bucket's median ({s.loss_z_with_grad:g} after a gradient "
            f"spike), noted only where this run's own noise reaches that far; critical if not back under {s.recover_z:g} in "
            f"{s.recover_steps} steps, or {s.cluster_spikes} in {s.cluster_steps} steps"
        )

    def note(self) -> str:
        """What limits or explains this check."""
        memory = self._memory
        waiting = [f"bucket {key} ({len(points)})" for key, points in sorted(memory.baselines.items()) if points.level is None]
        notes = [f"still learning, of {self._spike.min_points} points: {', '.join(waiting)}"] if waiting else []
        if memory.usual_clusters:
            notes.append(f"{memory.usual_clusters} clusters no rarer than this run's own rate of spikes")
        if memory.usual_spikes:
            notes.append(f"{memory.usual_spikes} noted: this run's own noise reaches that far")
        return "; ".join(notes)

    def levels(self) -> dict[int, Level]:
        """Where the baseline of each learnt bucket stands (logarithms)."""
        standing = {bucket: baseline.level for bucket, baseline in sorted(self._memory.baselines.items())}
        return {bucket: level for bucket, level in standing.items() if level is not None}

    def learning(self) -> int:
        """Buckets that are still learning their baseline."""
        return sum(baseline.level is None for baseline in self._memory.baselines.values())

    def usual_and_limit(self, bucket: int) -> tuple[float | None, float | None]:
        """(median, spike limit) of a bucket's loss; None during its warm-up."""
        level = self._level_of(bucket)
        return (None, None) if level is None else level.band(self._spike.loss_z)

    def on_stretch(self, records: Sequence[StepLine], context: RunContext, /) -> int:
        """Judge the first records, up to one that changes what the others may ask: which buckets have left their level."""
        memory, opened = self._memory, context.open_loss_spikes
        if context.rebase:
            self._forget(records[0].step)
            context.rebase = False
        self.drawn = []
        drawn = self.drawn
        baselines, easy_z, recover_points = memory.baselines, self._easy_z, self._spike.recover_points
        done = 0
        for record in records:
            step, first, points = record.step, len(drawn), []
            for batch in record.micro_batches:
                n_tokens, bucket = batch.n_tokens, batch.bucket
                if batch.ce_sum is None or n_tokens <= 0:
                    continue
                loss = batch.ce_sum / n_tokens
                value = math.log(loss) if loss > _TINY else _LOG_TINY
                baseline = baselines.get(bucket)
                if baseline is None or (level := baseline.level) is None:
                    self._learn(bucket, value, n_tokens)
                    drawn.append((bucket, step, loss, self._level_of(bucket)))
                    continue
                scale = max(level.scale * math.sqrt(level.count / n_tokens), level.floor)  # `scale_for`, without a call
                z = (value - level.median) / scale
                judged = Judged(batch, value, z, level, scale)
                points.append(judged)
                self.checked += 1
                memory.points += 1
                if z < easy_z and memory.calm_in_row >= recover_points and not memory.open:  # nearly always
                    memory.tail.points += 1
                    baseline.accept(value, n_tokens)
                    drawn.append((bucket, step, loss, baseline.level))
                else:
                    self._look_at(judged, baseline, record=record, context=context)
                    drawn.append((bucket, step, loss, self._level_of(bucket)))
            if len(record.micro_batches) > 1:  # the curves show the levels behind the whole record
                drawn[first:] = [(key, step, loss, self._level_of(key)) for key, _, loss, _ in drawn[first:]]
            context.judged.append(points)
            done += 1
            if len(memory.open) != opened or context.last_rise == step:
                context.set_open_loss_spikes(len(memory.open), step=step)
                break
        return done

    def _level_of(self, bucket: int) -> Level | None:
        baseline = self._memory.baselines.get(bucket)
        return None if baseline is None else baseline.level

    def _look_at(self, judged: Judged, baseline: Baseline, *, record: StepLine, context: RunContext) -> None:
        """Judge a point that is not low, or that comes while the run is not calm."""
        memory, s, batch, z = self._memory, self._spike, judged.batch, judged.z
        stands_out, is_usual, chance = self._weigh(z, record, context) if z > s.recover_z else _CALM
        if z > FROM_Z:
            memory.tail.see(z, step=record.step, loud=stands_out and not is_usual)
        else:
            memory.tail.points += 1
        calm = z < s.recover_z or judged.value - judged.level.median < self._least_rise / 2
        if calm and memory.calm_in_row >= s.recover_points and not memory.open:
            baseline.accept(judged.value, batch.n_tokens)
            return
        if not (is_usual and chance > _COMMON_CHANCE):
            self._feel(calm, record.step)
        spike = memory.open.get(batch.bucket)
        if spike is not None and spike.is_usual and stands_out and not is_usual:
            self.findings.amend(spike.finding, resolved_step=record.step)
            spike = None
        if spike is not None:
            if stands_out and len(spike.batch_ids) < _MAX_IDS:
                spike.batch_ids.append(batch.batch_id)
            self._follow(spike, judged, calm=calm, record=record, context=context)
        elif stands_out:
            self._begin(judged, is_usual=is_usual, record=record, context=context)
        if stands_out and memory.rested and (not is_usual or chance < _RARE_CHANCE):
            self._count(Onset(record.step, memory.points, chance, not is_usual), record, context)
        if batch.bucket not in memory.open:
            baseline.accept(judged.value, batch.n_tokens)

    def _learn(self, bucket: int, value: float, n_tokens: int) -> None:
        """Take in a point of the warm-up; at its end, what stood out in it counts as this run's usual."""
        memory, s = self._memory, self._spike
        baseline = memory.baselines.get(bucket)
        if baseline is None:
            baseline = memory.baselines[bucket] = Baseline(
                capacity=s.baseline_points, min_points=s.min_points, newest=s.level_points, floor=s.loss_floor, winsor_z=s.loss_z
            )
        baseline.accept(value, n_tokens)
        if baseline.level is not None:
            memory.points += len(baseline)
            memory.tail.points += len(baseline)
            for z in baseline.deviations():
                memory.tail.learn(z, loud=False)

    def _weigh(self, z: float, record: StepLine, context: RunContext) -> tuple[bool, bool, float]:
        """Whether a point stands out, whether this run's own noise (and its gradients') reaches that far, by what chance."""
        s = self._spike
        if not (z > s.loss_z or (z > s.loss_z_with_grad and self._grad_led(record, context))):
            return _CALM
        chance = min(1.0, self._chance(z, record, context) / min(1.0, self._memory.points / _YOUNG_POINTS))
        return True, chance > s.usual_p * (1.0 if context.gradients else _ALONE_FACTOR), chance

    def _chance(self, z: float, record: StepLine, context: RunContext) -> float:
        """Chance of so high a loss beside so large a gradient, by the run's own noise: of a product of two (Fisher 1925)."""
        alone, gradient = self._memory.tail.chance(z, step=record.step), context.grad_chance_near(record.step)
        if gradient is None:  # a log without gradients: the loss alone has to do
            return alone
        product = max(alone * gradient, _TINY)
        return product * (1.0 - math.log(product))

    def _forget(self, step: int) -> None:
        """A declared change has moved the loss for good: learn it anew."""
        memory = self._memory
        for spike in memory.open.values():
            self.findings.amend(spike.finding, resolved_step=step)
        memory.open, memory.baselines = {}, {}
        memory.uneasy_since, memory.calm_in_row, memory.rested = None, 0, True

    def _feel(self, calm: bool, step: int) -> None:
        """Keep track of since when the run has not been calm."""
        memory = self._memory
        memory.calm_in_row = memory.calm_in_row + 1 if calm else 0
        if memory.calm_in_row >= self._spike.recover_points:
            memory.uneasy_since, memory.rested = None, True
        elif not calm and memory.uneasy_since is None:
            memory.uneasy_since = step

    def _grad_led(self, record: StepLine, context: RunContext) -> bool:
        grad_z = context.grad_z_before(record.step, steps=GRAD_LEAD_STEPS)
        return grad_z is not None and grad_z > self._spike.loss_z_with_grad

    def _begin(self, judged: Judged, *, is_usual: bool, record: StepLine, context: RunContext) -> None:
        memory, batch, level = self._memory, judged.batch, judged.level
        loss, usual = math.exp(judged.value), math.exp(level.median)
        grad_z = context.grad_z_of(record.step)
        led = context.grad_z_before(record.step, steps=GRAD_LEAD_STEPS)
        memory.usual_spikes += is_usual
        begun = context.save_begun_step
        finding = self._finding(
            "info" if is_usual else "warn",
            f"loss {loss:.3g} at step {record.step}, {loss / usual:.1f}x the usual {usual:.3g} of bucket {batch.bucket}"
            + (", as this run's own noise has it now and then" if is_usual else ""),
            steps=(record.step, record.step, record.step),
            bucket=batch.bucket,
            batch_ids=(batch.batch_id,),
            loss=loss,
            usual=usual,
            z=round(judged.z, 2),
            n_tokens=batch.n_tokens,
            usual_tokens=level.count,
            tail_chance=float(f"{memory.tail.chance(judged.z, step=record.step):.3g}"),
            grad_z=None if grad_z is None else round(grad_z, 2),
            grad_z_before=None if led is None else round(led, 2),
            steps_since_save=None if begun is None else record.step - begun,
            epoch=batch.epoch,
            rows=[row for row in batch.rows[:_MAX_ROWS] if 0 <= row < MAX_SAMPLE],
        )
        uneasy_since = record.step if memory.uneasy_since is None else memory.uneasy_since
        onset = context.led_from(uneasy_since, self._spike.loss_z_with_grad, step=record.step)
        memory.open[batch.bucket] = OpenSpike(
            record.step, onset, finding, 0, damage=False, is_usual=is_usual, batch_ids=[batch.batch_id]
        )
        context.last_rise = record.step
        if not is_usual:
            context.last_loss_spike = record.step

    def _follow(self, spike: OpenSpike, judged: Judged, *, calm: bool, record: StepLine, context: RunContext) -> None:
        memory, s, bucket = self._memory, self._spike, judged.batch.bucket
        if calm:
            self.findings.amend(spike.finding, resolved_step=record.step)
            del memory.open[bucket]
            if memory.unrecovered is not None and not any(each.damage for each in memory.open.values()):
                self.findings.amend(memory.unrecovered, back_step=record.step)
                memory.unrecovered = None
            return
        spike.points += 1
        self.findings.amend(spike.finding, last_step=record.step, batch_ids=tuple(spike.batch_ids))
        rise = judged.value - judged.level.median
        if record.step - spike.step < s.recover_steps or spike.points < self._rise.alone_points or rise < self._least_rise:
            return
        if spike.damage or context.planned_near(spike.onset, steps=self._rise.planned_steps) is None:
            spike.damage = True
            self._unrecovered(bucket, record=record, context=context)
        elif spike.points >= 3 * self._rise.alone_points:  # settled where the declared change has put it
            self.findings.amend(spike.finding, resolved_step=record.step)
            del memory.open[bucket], memory.baselines[bucket]

    def _unrecovered(self, bucket: int, *, record: StepLine, context: RunContext) -> None:
        """One finding for all buckets that do not come back: the damage is one."""
        memory = self._memory
        if memory.unrecovered is None:
            memory.damaged, memory.damage_step = [], min(each.step for each in memory.open.values())
        if bucket not in memory.damaged:
            memory.damaged = sorted([*memory.damaged, bucket])
        named = ("bucket " if len(memory.damaged) == 1 else "buckets ") + ", ".join(map(str, memory.damaged))
        message = f"loss of {named} has not come back since the spike at step {memory.damage_step}"
        if memory.unrecovered is not None:
            self.findings.amend(memory.unrecovered, last_step=record.step, message=message, buckets=list(memory.damaged))
            return
        memory.unrecovered = self._alarm(
            message,
            onset=min(each.onset for each in memory.open.values()),
            record=record,
            context=context,
            bucket=None,
            buckets=[bucket],
        )

    def _count(self, spike: Onset, record: StepLine, context: RunContext) -> None:
        """Count a separate spike, and raise the alarm if they come too thick."""
        memory, s = self._memory, self._spike
        memory.recent = [seen for seen in memory.recent if seen.step > record.step - s.cluster_steps]
        memory.recent.append(spike)
        memory.spikes += spike.loud
        memory.rested = False
        if len(memory.recent) < s.cluster_spikes:
            memory.cluster = None
            return
        if memory.cluster is not None:
            self.findings.amend(memory.cluster, last_step=record.step, spikes=len(memory.recent))
            return
        first, warned = memory.recent[0], sum(each.loud for each in memory.recent)
        usual = memory.spikes - warned
        # The run's own rate before the cluster, a deviation up; lower where its noise does not reach that high.
        rate = (usual + math.sqrt(usual) + _PRIOR_SPIKES) / (first.judged_before + _PRIOR_POINTS)
        highest = max(*(each.chance for each in memory.recent), _LEAST_RATE)
        rate = min(rate, highest) if warned >= s.cluster_spikes else highest
        points = max(len(memory.recent), s.cluster_steps * len(record.micro_batches))
        windows = max(1.0, memory.points / points)
        chance = windows * binomial_tail(len(memory.recent), points, min(rate, 1.0))
        if chance >= s.chance_p * (1.0 if warned >= s.cluster_spikes else _NOTED_SHARE):
            memory.usual_clusters += 1
            return
        memory.cluster = self._alarm(
            f"{len(memory.recent)} separate loss spikes in the {record.step - first.step + 1} steps from step {first.step}",
            onset=first.step,
            record=record,
            context=context,
            bucket=None,
            spikes=len(memory.recent),
            usual_spikes_per_point=rate,
            chance_p=chance,
        )
