"""Speed: throughput against what it usually is, and whether the target workers share the work.

The hard decision: tokens per second are compared per composition of the update, because short and long buckets differ
by far more than the 15 % that matter; and steps beside a save are left out, which the save's own detector judges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from dflash.config import WatchConfig
from dflash.health.context import RunContext
from dflash.health.detectors.base import Detector, Memory
from dflash.health.detectors.grad_spike import composition
from dflash.health.lines import StepLine

_LEARN_POINTS = 16
_PACE = 1 / 64
_CLIP = 1.0  # logarithm: one batch of a few tokens is no slow window ...
_CLIP_LEARNT = 0.5  # ... and teaches even less


class UsualSpeed(msgspec.Struct, array_like=True):
    """Mean log tokens per second of one composition, and the points it was learnt from."""

    mean: float
    points: int


class ThroughputMemory(Memory):
    """Usual speeds, the window in progress, and the stretch of slow windows."""

    usual: dict[str, UsualSpeed] = msgspec.field(default_factory=dict)
    total: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    first_step: int = 0
    slow_in_row: int = 0
    very_slow_in_row: int = 0
    slow_since: int = 0
    slow: int | None = None
    very_slow: int | None = None


class Throughput(Detector):
    """Tokens per second far under what they usually are."""

    name = "throughput"
    domain = "operations"
    _memory: ThroughputMemory

    def __init__(self, watch: WatchConfig) -> None:
        super().__init__(ThroughputMemory())
        self._watch = watch
        self._slow, self._very_slow = math.log(watch.slow_frac), math.log(watch.very_slow_frac)

    def rule(self) -> str:
        """The rule with its thresholds."""
        w = self._watch
        return (
            f"tokens/s under {100 * w.slow_frac:g} % of the usual in {w.slow_windows} windows in a row (each at least "
            f"{w.slow_steps} steps and {w.slow_s:g} s, saves left out): a warning; under {100 * w.very_slow_frac:g} % critical "
            "for operations"
        )

    def on_new_process(self) -> None:
        """A new process may run elsewhere: its speed is learnt anew."""
        self._memory = ThroughputMemory()

    def on_stretch(self, records: Sequence[StepLine], context: RunContext, /) -> int:
        """Judge consecutive records; only events begin and end a save."""
        if context.open_saves:
            return len(records)
        memory, slow_steps, slow_s = self._memory, self._watch.slow_steps, self._watch.slow_s
        total, steps, seconds = memory.total, memory.steps, memory.seconds
        for record in records:
            if record.tokens_per_s <= 0.0 or (key := composition(record)) is None:
                continue
            value, usual = math.log(record.tokens_per_s), memory.usual.get(key)
            if usual is None or usual.points < _LEARN_POINTS:
                self._learn(key, value)
                continue
            self.checked += 1
            off = value - usual.mean
            if not memory.slow_in_row:
                usual.mean += _PACE * (off if -_CLIP_LEARNT < off < _CLIP_LEARNT else math.copysign(_CLIP_LEARNT, off))
            if not steps:
                memory.first_step = record.step
            total += off if -_CLIP < off < _CLIP else math.copysign(_CLIP, off)
            steps += 1
            seconds += record.step_time_s
            if steps >= slow_steps and seconds >= slow_s:
                self._window(total / steps, record.step)
                total, steps, seconds = 0.0, 0, 0.0
        memory.total, memory.steps, memory.seconds = total, steps, seconds
        return len(records)

    def _learn(self, key: str, value: float) -> None:
        """Take the log speed of a composition that is new into its mean."""
        usual = self._memory.usual.setdefault(key, UsualSpeed(0.0, 0))
        usual.points += 1
        usual.mean += (value - usual.mean) / usual.points

    def _window(self, off: float, step: int) -> None:
        memory = self._memory
        if off >= self._slow:
            for number in (memory.slow, memory.very_slow):
                if number is not None:
                    self.findings.amend(number, resolved_step=step)
            memory.slow_in_row = memory.very_slow_in_row = 0
            memory.slow = memory.very_slow = None
            return
        if not memory.slow_in_row:
            memory.slow_since = memory.first_step
        memory.slow_in_row += 1
        memory.very_slow_in_row = memory.very_slow_in_row + 1 if off < self._very_slow else 0
        needed = self._watch.slow_windows
        if memory.slow_in_row >= needed:
            memory.slow = self._tell(memory.slow, critical=False, off=off, step=step)
        if memory.very_slow_in_row >= needed:
            memory.very_slow = self._tell(memory.very_slow, critical=True, off=off, step=step)

    def _tell(self, number: int | None, *, critical: bool, off: float, step: int) -> int:
        since = self._memory.slow_since
        if number is not None:
            self.findings.amend(number, last_step=step, of_usual_frac=round(math.exp(off), 4))
            return number
        return self._finding(
            "critical" if critical else "warn",
            f"throughput at {100 * math.exp(off):.0f} % of the usual since step {since}",
            steps=(since, since, step),
            of_usual_frac=round(math.exp(off), 4),
            alarm_step=step,
        )


class BalanceMemory(Memory):
    """Batches finished by each target when the window began."""

    start: list[int] = msgspec.field(default_factory=list)
    first_step: int = 0
    open: int | None = None


class TargetBalance(Detector):
    """Target workers that finish very different numbers of batches."""

    name = "target imbalance"
    sparse = True
    domain = "operations"
    _memory: BalanceMemory

    def __init__(self, watch: WatchConfig) -> None:
        super().__init__(BalanceMemory())
        self._watch = watch

    def rule(self) -> str:
        """The rule with its thresholds."""
        w = self._watch
        return (
            f"most and fewest batches finished by a target worker differ by over {100 * w.imbalance_frac:g} % of their mean, over "
            f"{w.imbalance_batches} batches"
        )

    def on_new_process(self) -> None:
        """A new process counts from zero."""
        self._memory.start = []

    def on_stretch(self, records: Sequence[StepLine], _context: RunContext, /) -> int:
        """Judge consecutive records."""
        for record in records:
            if len(record.target_depths) >= 2:
                self._compare(record)
        return len(records)

    def _compare(self, record: StepLine) -> None:
        depths, memory = record.target_depths, self._memory
        self.checked += 1
        if len(memory.start) != len(depths) or depths[0] < memory.start[0]:
            memory.start, memory.first_step = list(depths), record.step
            return
        if sum(depths) - sum(memory.start) < self._watch.imbalance_batches:
            return
        done = [now - before for now, before in zip(depths, memory.start, strict=True)]
        mean = sum(done) / len(done)
        spread, slowest = max(done) - min(done), done.index(min(done))
        first = memory.first_step
        memory.start, memory.first_step = list(depths), record.step
        if spread <= self._watch.imbalance_frac * mean:
            if memory.open is not None:
                self.findings.amend(memory.open, resolved_step=record.step)
                memory.open = None
        elif memory.open is not None:
            self.findings.amend(memory.open, last_step=record.step, batches=done)
        else:
            memory.open = self._finding(
                "warn",
                f"target worker {slowest} finished {done[slowest]} batches from step {first}, the mean is {mean:.1f}",
                steps=(first, first, record.step),
                target=slowest,
                batches=done,
            )
