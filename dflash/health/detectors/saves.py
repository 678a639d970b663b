"""Saves: those that failed, those that hold training up or never end, and whether spikes come with them.

The hard decision: a link between spikes and saves is a diagnosis and never an alarm, and it needs at least
`save_min_saves` saves: two coincidences prove nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from dflash.config import WatchConfig
from dflash.health.baseline import median_of_sorted
from dflash.health.context import RunContext
from dflash.health.detectors.base import Detector, Memory
from dflash.health.lines import EventLine, StepLine
from dflash.health.trend import binomial_tail

_KEPT_TIMES = 256
_KEPT_SAVES = 16
_LEAST_TIMES = 8
_TAIL_PERCENTILE = 99
_JOINT_GRAD_Z = 4.0


class SaveMemory(Memory):
    """Failed saves that no later one has made good."""

    open_failures: list[int] = msgspec.field(default_factory=list)


class SaveFailure(Detector):
    """A checkpoint that could not be written, or was skipped because the one before was still being written."""

    name = "save failure"
    domain = "operations"
    _memory: SaveMemory

    def __init__(self) -> None:
        super().__init__(SaveMemory())

    def rule(self) -> str:
        """The rule with its thresholds."""
        return "every save that begins becomes durable; a failed or skipped one is a warning until a later one is durable"

    def on_event(self, event: EventLine) -> None:
        """Judge an event."""
        memory = self._memory
        if event.event == "save_durable":
            self.checked += 1
            for number in memory.open_failures:
                self.findings.amend(number, resolved_step=event.step)
            memory.open_failures = []
        elif event.event in ("save_failed", "save_skipped"):
            self.checked += 1
            verb = "failed" if event.event == "save_failed" else "was skipped"
            reason = event.details.get("reason") or event.details.get("error")
            message = f"the save of step {event.step} {verb}" + (f": {reason}" if reason else "")
            memory.open_failures.append(self._finding("warn", message, steps=(event.step, event.step, event.step)))


class StallMemory(Memory):
    """Step times beside and during saves, how long saves took, and the one in progress."""

    beside_s: list[float] = msgspec.field(default_factory=list)
    during_s: list[float] = msgspec.field(default_factory=list)
    lengths_s: list[float] = msgspec.field(default_factory=list)
    begun: dict[int, float] = msgspec.field(default_factory=dict)
    stalled: int | None = None
    stalls: int = 0
    hung: int | None = None


class SaveStall(Detector):
    """Steps that take longer while a checkpoint is written, or a save that does not end."""

    name = "save stall"
    domain = "operations"
    _memory: StallMemory

    def __init__(self, watch: WatchConfig) -> None:
        super().__init__(StallMemory())
        self._watch = watch

    def rule(self) -> str:
        """The rule with its thresholds."""
        w = self._watch
        return (
            f"slowest steps during a save (99th percentile) over {w.stall_factor:g}x the median and slower than any usual one: a "
            f"warning; a save over {w.hung_factor:g}x as long as usual and {w.hung_min_s:g} s hangs: critical for operations"
        )

    def on_new_process(self) -> None:
        """Saves in progress ended with their process."""
        self._memory.begun, self._memory.hung = {}, None

    def on_event(self, event: EventLine) -> None:
        """Judge an event."""
        memory = self._memory
        if event.event == "save_begin":
            memory.begun[event.step] = event.wall_time_s
        elif event.event in ("save_durable", "save_failed") and event.step in memory.begun:
            memory.lengths_s = [*memory.lengths_s[1 - _KEPT_SAVES :], event.wall_time_s - memory.begun.pop(event.step)]
            if memory.hung is not None:
                self.findings.amend(memory.hung, resolved_step=event.step)
                memory.hung = None
            self._compare(event.step)
        elif event.event == "save_skipped":
            memory.begun.pop(event.step, None)

    def on_stretch(self, records: Sequence[StepLine], _context: RunContext, /) -> int:
        """Judge consecutive records; only events begin and end a save."""
        memory = self._memory
        if memory.begun:
            for record in records:
                self._during(record)
            return len(records)
        beside = memory.beside_s
        beside += [record.step_time_s for record in records]
        del beside[:-_KEPT_TIMES]
        return len(records)

    def _during(self, record: StepLine) -> None:
        memory = self._memory
        self.checked += 1
        memory.during_s = [*memory.during_s[1 - _KEPT_TIMES :], record.step_time_s]
        step, begun_s = min(memory.begun.items())
        usual_s = median_of_sorted(sorted(memory.lengths_s)) if memory.lengths_s else 0.0
        lasts_s = record.wall_time_s - begun_s
        if lasts_s <= max(self._watch.hung_factor * usual_s, self._watch.hung_min_s):
            return
        if memory.hung is not None:
            self.findings.amend(memory.hung, last_step=record.step, lasts_s=round(lasts_s, 3))
            return
        memory.hung = self._finding(
            "critical",
            f"the save of step {step} has taken {lasts_s:.0f} s and not ended; usual are {usual_s:.1f} s",
            steps=(step, step, record.step),
            lasts_s=round(lasts_s, 3),
            usual_s=round(usual_s, 3),
            alarm_step=record.step,
        )

    def _compare(self, step: int) -> None:
        memory = self._memory
        if len(memory.beside_s) < _LEAST_TIMES or not memory.during_s:
            return
        usual_s = median_of_sorted(sorted(memory.beside_s[-_KEPT_TIMES:]))
        slowest_s = float(np.percentile(memory.during_s, _TAIL_PERCENTILE))
        rarely_s = float(np.percentile(memory.beside_s[-_KEPT_TIMES:], _TAIL_PERCENTILE))
        if slowest_s <= max(self._watch.stall_factor * usual_s, rarely_s):
            return
        memory.stalls += 1
        if memory.stalled is not None:
            self.findings.amend(memory.stalled, last_step=step, saves=memory.stalls, slowest_s=round(slowest_s, 4))
            return
        memory.stalled = self._finding(
            "warn",
            f"steps during a save take up to {slowest_s:.2f} s, {slowest_s / usual_s:.1f}x the usual {usual_s:.2f} s",
            steps=(step, step, step),
            slowest_s=round(slowest_s, 4),
            usual_s=round(usual_s, 4),
            saves=1,
        )


class Tally(msgspec.Struct):
    """Spikes near saves and elsewhere, and how many saves had one."""

    near_spikes: int = 0
    spikes: int = 0
    saves_with_spike: int = 0
    counted_save: int | None = None
    first_spike: int | None = None


class CorrelationMemory(Memory):
    """Steps near saves and elsewhere; spikes that were warned of, all that stood out, and those whose gradient did as well."""

    near_steps: int = 0
    steps: int = 0
    saves: int = 0
    last_save: int | None = None
    warned: Tally = msgspec.field(default_factory=Tally)
    noted: Tally = msgspec.field(default_factory=Tally)
    joint: Tally = msgspec.field(default_factory=Tally)
    linked: int | None = None


class SaveCorrelation(Detector):
    """Loss spikes that come with saves more often than chance lets them."""

    name = "save correlation"
    follows = True
    domain = "diagnosis"
    _memory: CorrelationMemory

    def __init__(self, watch: WatchConfig) -> None:
        super().__init__(CorrelationMemory())
        self._watch = watch

    def rule(self) -> str:
        """The rule with its thresholds."""
        w = self._watch
        return (
            f"loss spikes within {w.save_near_steps} steps of a save: binomial p < {w.save_p:g} (shared among the saves), at least "
            f"{w.save_min_saves} saves, {w.save_ratio:g}x the usual rate; a diagnosis only"
        )

    def note(self) -> str:
        """What limits or explains this check."""
        figures = self.figures()
        if not figures["spikes"]:
            return ""
        text = f"{figures['near_spikes']} of {figures['spikes']} spikes near one of {figures['saves']} saves (p {figures['p']:.2g})"
        return text if self._memory.linked is not None else f"{text}: save-linked unproven"

    def figures(self) -> dict[str, Any]:
        """The statistic: spikes that were warned of near saves against those elsewhere."""
        return self._figures(self._memory.warned)

    def is_proven(self) -> bool:
        """Whether spikes come with saves."""
        return self._memory.linked is not None

    def _figures(self, tally: Tally) -> dict[str, Any]:
        memory = self._memory
        share = memory.near_steps / memory.steps if memory.steps else 0.0
        expected = share * tally.spikes
        return {
            "saves": memory.saves,
            "spikes": tally.spikes,
            "near_spikes": tally.near_spikes,
            "saves_with_spike": tally.saves_with_spike,
            "near_share": round(share, 5),
            "p": binomial_tail(tally.near_spikes, tally.spikes, share) if tally.near_spikes else 1.0,
            "ratio": round(tally.near_spikes / expected, 3) if expected else 0.0,
        }

    def on_event(self, event: EventLine) -> None:
        """Judge an event."""
        if event.event == "save_begin":
            self._memory.saves += 1
            self._memory.last_save = event.step

    def on_stretch(self, records: Sequence[StepLine], context: RunContext, /) -> int:
        """Judge consecutive records without a save between them; only in the last of them may a spike have begun."""
        memory, newest = self._memory, records[-1]
        memory.steps += len(records)
        near = False
        if memory.last_save is not None:
            far_step = memory.last_save + self._watch.save_near_steps
            near = newest.step < far_step
            memory.near_steps += len(records) if near else sum([record.step < far_step for record in records])
        if context.last_rise == newest.step:
            self._see_rise(newest.step, near=near, context=context)
        return len(records)

    def _see_rise(self, step: int, *, near: bool, context: RunContext) -> None:
        self.checked += 1
        self._count(self._memory.noted, near=near, step=step)
        if (context.grad_z_of(step) or 0.0) > _JOINT_GRAD_Z:  # in data with hard batches, what tells spikes from those
            self._count(self._memory.joint, near=near, step=step)
        if context.last_loss_spike == step:
            self._count(self._memory.warned, near=near, step=step)

    def _count(self, tally: Tally, *, near: bool, step: int) -> None:
        tally.spikes += 1
        if not near:
            return
        tally.near_spikes += 1
        if tally.counted_save != self._memory.last_save:
            tally.saves_with_spike += 1
            tally.counted_save = self._memory.last_save
        tally.first_spike = step if tally.first_spike is None else tally.first_spike
        self._test(tally, step)

    def _test(self, tally: Tally, step: int) -> None:
        memory, watch = self._memory, self._watch
        figures = self._figures(tally)
        # Tested again at every spike: the level is shared among the saves.
        rare = figures["p"] * max(memory.saves, 1) < watch.save_p
        if not rare or tally.saves_with_spike < watch.save_min_saves or figures["ratio"] < watch.save_ratio:
            return
        message = f"{tally.near_spikes} of {tally.spikes} loss spikes come within {watch.save_near_steps} steps of a save"
        if memory.linked is None:
            first = step if tally.first_spike is None else tally.first_spike
            memory.linked = self._finding("warn", message, steps=(first, first, step))
        self.findings.amend(memory.linked, last_step=step, message=message, **figures)
