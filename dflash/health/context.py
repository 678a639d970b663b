"""What every detector may know of the run besides the record in hand: a short, bounded memory of recent steps.

Invariant: a pure function of the live records and events seen so far; no clock, no file.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import msgspec

from dflash.health.baseline import Level, median_of_sorted
from dflash.health.lines import LARGEST, EventLine, MicroBatchLine, StepLine
from dflash.records import LrOverlay

RECENT_STEPS = 512  # longest span whose batches a critical finding can name
STEP_TIMES = 64
GRAD_LEAD_STEPS = 2
EXPLOSION_Z, EXPLOSION_LEAD_STEPS = 20.0, 20
_SAVE_ENDED = frozenset({"save_durable", "save_failed", "save_skipped"})
# Signs of life of the trainer itself; a heartbeat only proves that the log writer lives.
_LIFE = frozenset({"start", "resume", "rollback_end", "save_begin", "save_staged", "save_durable", "finish"})

_PLANNED = frozenset({"epoch", "lr_change"})
_STEP = attrgetter("step")


class RecentStep(msgspec.Struct, array_like=True, gc=False):
    """A step of the recent past: its batches, how far its gradient norm stood out, and the chance of that where it did."""

    step: int
    batch_ids: tuple[int, ...]
    grad_z: float | None
    grad_chance: float | None = None

    def stands_out(self, z: float, *, chance: float | None) -> None:
        """Note how far its gradient norm stood out, and how rare that is by the run's own noise."""
        self.grad_z = math.floor(z * 1000.0 + 0.5) / 1000.0  # a quarter of what `round` costs
        self.grad_chance = chance


class Judged(msgspec.Struct, frozen=True, gc=False):
    """A micro-batch of the record in hand against its bucket's baseline.

    Attributes:
        value: logarithm of its mean loss; z: how far that lies above the level, in spreads of `scale`.
        scale: spread expected of a point that averages over so many tokens.
    """

    batch: MicroBatchLine
    value: float
    z: float
    level: Level
    scale: float


class LastValues(msgspec.Struct, frozen=True):
    """The newest readings, for the report's first screen."""

    ce: float | None
    accuracy: float
    accepted_length: float
    lr: float
    tokens_per_s: float


class RunContext(msgspec.Struct):
    """Shared memory of the detectors.

    Attributes:
        steps: live step records seen.
        steps_without_loss: of them, those that carry neither a loss nor the word that it was not finite.
        open_saves: steps whose save has begun and not ended.
        total_steps: optimizer steps the schedule is laid out for, once known.
        overlay: what a rollback changed about the learning rate.
        last_life_s: wall time of the trainer's last sign of life.
        last_loss_spike: step of the newest loss spike in any bucket; last_rise: likewise, also where it is only noted.
        open_loss_spikes: buckets that have not come back from one, since step `open_since`; `open_before` it was so many.
        planned: (step, event) of the newest declared changes that may move the loss.
        rebase: a declared change has moved the loss for good; its baselines are to be learnt anew.
        judged: micro-batches of each of the records in hand, while they are being judged.
        save_begun_step: newest save that has begun.
        gradients: the log holds gradient norms.
    """

    steps: int = 0
    steps_without_loss: int = 0
    recent: list[RecentStep] = msgspec.field(default_factory=list)
    open_saves: list[int] = msgspec.field(default_factory=list)
    total_steps: int | None = None
    overlay: LrOverlay | None = None
    last_life_s: float | None = None
    step_times_s: list[float] = msgspec.field(default_factory=list)
    last_loss_spike: int | None = None
    last_rise: int | None = None
    open_loss_spikes: int = 0
    open_since: int = 0
    open_before: int = 0
    last: LastValues | None = None
    finished: bool = False
    planned: list[tuple[int, str]] = msgspec.field(default_factory=list)
    rebase: bool = False
    judged: list[Any] = msgspec.field(default_factory=list)
    save_begun_step: int | None = None
    gradients: bool = False

    def see_step(self, record: StepLine) -> None:
        """Remember a live record; called before any detector sees it."""
        self.see_stretch((record,))
        self.forget_old()

    def see_stretch(self, records: Sequence[StepLine]) -> None:
        """Remember consecutive live records, before any detector sees one of them: what looks back says from which step."""
        self.steps += len(records)
        self.steps_without_loss += sum([record.ce is None and not record.nonfinite for record in records])
        self.step_times_s += [record.step_time_s for record in records[-STEP_TIMES:]]
        del self.step_times_s[:-STEP_TIMES]
        newest = records[-1]
        self.last_life_s = newest.wall_time_s
        self.last = LastValues(newest.ce, newest.accuracy, newest.accepted_length, newest.lr, newest.tokens_per_s)
        self.recent += [RecentStep(record.step, _batch_ids(record), None) for record in records]

    def forget_old(self) -> None:
        """Forget steps too old to look back at; called once the records seen have been judged."""
        del self.recent[:-RECENT_STEPS]

    def see_event(self, event: EventLine) -> None:
        """Remember an event."""
        if event.event in _LIFE:
            self.last_life_s = event.wall_time_s
        if event.event == "save_begin" and event.step not in self.open_saves:
            self.open_saves.append(event.step)
            self.save_begun_step = event.step
        elif event.event in _SAVE_ENDED and event.step in self.open_saves:
            self.open_saves.remove(event.step)
        if event.event in _PLANNED and event.step > 0 and event.details.get("from") != "warmup":
            self.planned = [*self.planned[-7:], (event.step, event.event)]
        if event.event in ("start", "resume", "finish"):
            self.finished = event.event == "finish"
        total = event.details.get("total_steps")
        if isinstance(total, int) and 0 < total <= LARGEST:
            self.total_steps = total
        if "overlay" in event.details:
            self.overlay = _overlay_of(event.details["overlay"])

    def new_process(self) -> None:
        """Forget what ended with the process that wrote the previous segment."""
        self.open_saves.clear()
        self.step_times_s.clear()

    def batches_between(self, first_step: int, last_step: int) -> tuple[int, ...]:
        """Batch ids that steps in [first_step, last_step] consumed, as remembered at the last of them, ascending."""
        return tuple(sorted({batch for seen in self._up_to(last_step) if first_step <= seen.step for batch in seen.batch_ids}))

    def led_from(self, onset: int, z: float, *, step: int) -> int:
        """The step at which a gradient outlier led what shows from `onset` on, as seen from `step`.

        The gradient leads by a step or two; one that no chance explains leads by more, because momentum spreads its damage.
        """
        leading = [
            seen.step
            for seen in self._up_to(step)
            if onset - EXPLOSION_LEAD_STEPS <= seen.step < onset
            and (seen.grad_z or 0.0) > (z if seen.step >= onset - GRAD_LEAD_STEPS else EXPLOSION_Z)
        ]
        return min(leading, default=onset)

    def _up_to(self, step: int) -> list[RecentStep]:
        """What is remembered at `step`."""
        end = bisect_right(self.recent, step, key=_STEP)
        return self.recent[max(0, end - RECENT_STEPS) : end]

    def set_open_loss_spikes(self, count: int, *, step: int) -> None:
        """From `step` on so many buckets have not come back."""
        self.open_before, self.open_since, self.open_loss_spikes = self.open_loss_spikes, step, count

    def loss_spikes_open_at(self, step: int) -> int:
        """How many buckets had not come back at `step`, which is one of the records in hand."""
        return self.open_loss_spikes if step >= self.open_since else self.open_before

    def planned_near(self, step: int, *, steps: int) -> tuple[int, str] | None:
        """The declared change nearest to `step`, if it is no more than `steps` away."""
        near = [change for change in self.planned if abs(change[0] - step) <= steps]
        return min(near, key=lambda change: abs(change[0] - step), default=None)

    def step_time_median_s(self) -> float | None:
        """Median time of the recent steps, None before the first."""
        return median_of_sorted(sorted(self.step_times_s)) if self.step_times_s else None

    def place_of(self, step: int) -> int:
        """Where in `recent` a step that has been seen stands."""
        return bisect_left(self.recent, step, key=_STEP)

    def grad_z_of(self, step: int) -> float | None:
        """How far the gradient norm of `step` stood out; None where it was not judged."""
        return self.recent[self.place_of(step)].grad_z

    def grad_chance_near(self, step: int) -> float | None:
        """Smallest chance of the gradients of `step` and of those that may have led it.

        Returns:
            1 where none stood out, None where the gradient of `step` was not judged.
        """
        place = self.place_of(step)
        if self.recent[place].grad_z is None:
            return None
        near = [
            seen.grad_chance
            for seen in self.recent[max(0, place - GRAD_LEAD_STEPS) : place + 1]
            if seen.grad_chance is not None and seen.step >= step - GRAD_LEAD_STEPS
        ]
        return min(1.0, (1 + GRAD_LEAD_STEPS) * min(near, default=1.0))

    def grad_z_before(self, step: int, *, steps: int) -> float | None:
        """Largest gradient z of the `steps` steps before `step`, None where none was judged."""
        place = self.place_of(step)
        seen = [r.grad_z for r in self.recent[max(0, place - steps) : place] if step - steps <= r.step and r.grad_z is not None]
        return max(seen, default=None)


def _batch_ids(record: StepLine) -> tuple[int, ...]:
    batches = record.micro_batches
    return (batches[0].batch_id,) if len(batches) == 1 else tuple([batch.batch_id for batch in batches])


def _overlay_of(value: Any) -> LrOverlay | None:
    """An overlay as the log has it; what is none changes nothing, like any other unknown detail."""
    try:
        return msgspec.convert(value, LrOverlay | None)
    except msgspec.ValidationError:
        return None
