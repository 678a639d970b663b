"""Decline of the queues between the stages: the sign, long before starvation, that a producer is losing ground.

Invariant: memory stays bounded however long the run: depths are averaged in blocks whose size doubles whenever there
are `queue_window` of them, so the whole run is always in view.

The hard decision: at the end of its plan a producer stops and its queue drains, which looks exactly like a decline.
A depth therefore counts only once `_IN_FLIGHT` more batches have been produced (consumed + waiting) than by its time;
a batch on its way between two queues is in neither, so the sum wavers by a few even when nothing is produced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dflash.config import HealthConfig
from dflash.health.context import RunContext
from dflash.health.detectors.base import Detector, Memory
from dflash.health.lines import StepLine
from dflash.health.trend import mann_kendall_decline_p, percentile, theil_sen

NAMES = ("ready", "feature")
_LEVEL_BLOCKS = 4  # blocks whose mean is a level
_TEST_EVERY = 2  # blocks between tests
_MIN_BLOCKS = 12  # blocks from the settled level on before a trend is tested
_SETTLED_PERCENTILE = 95  # of the block means: passes over the short peaks while the consumer is held up
_FILLED_FRAC = 0.95  # a queue has filled once it reaches this much of its settled level
_LATE_BLOCKS = 5  # blocks since the queue was last full
_MAX_PENDING = 512
_FURTHEST = 4  # a trend is not drawn out to more than this many times the span it was seen over ...
_DRAWN_OUT_BLOCK = 2  # ... nor before blocks hold this many records: one tooth of a saw is no trend
_IN_FLIGHT = 16  # more batches than are ever between the queues of one replica


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Mean depth over some records."""

    mean: float
    first_step: int
    last_step: int


class QueueTrack(msgspec.Struct):
    """History of one queue's depth.

    Attributes:
        pending: (produced, step, depth) records that wait for more to be produced.
        filling: (step, depth) records of the block in progress.
        per_block: records of one block.
        since_test: blocks completed since the last test.
    """

    pending: list[tuple[int, int, int]] = msgspec.field(default_factory=list)
    filling: list[tuple[int, int]] = msgspec.field(default_factory=list)
    blocks: list[Block] = msgspec.field(default_factory=list)
    per_block: int = 1
    since_test: int = 0
    open_decline: int | None = None
    settled: float = 0.0


class QueueMemory(Memory):
    """One track for each queue."""

    tracks: dict[str, QueueTrack] = msgspec.field(default_factory=dict)


class QueueDecline(Detector):
    """A queue that sinks below its settled level with a significant trend, or will be empty before the run ends."""

    name = "queue decline"
    sparse = True
    domain = "operations"
    _memory: QueueMemory

    def __init__(self, health: HealthConfig) -> None:
        super().__init__(QueueMemory(tracks={name: QueueTrack() for name in NAMES}))
        self._window = health.queue_window
        self._level_frac = health.queue_level_frac
        self._p = health.queue_p
        self._min_level = health.queue_min_level

    def rule(self) -> str:
        """The rule with its thresholds."""
        return (
            f"a falling trend (Mann-Kendall p < {self._p:g}) to under {100 * self._level_frac:.0f} % of the settled level, or "
            f"to an empty queue before the run ends; queues that settle under {self._min_level:g} are too short to judge"
        )

    def note(self) -> str:
        """What limits or explains this check."""
        levels = [f"{name} settled at {track.settled:.0f}" for name, track in self._memory.tracks.items() if track.settled]
        return ", ".join(levels)

    def on_new_process(self) -> None:
        """A new process starts with empty queues: their history begins anew."""
        self._memory.tracks = {name: QueueTrack() for name in NAMES}

    def on_stretch(self, records: Sequence[StepLine], context: RunContext, /) -> int:
        """Judge consecutive records."""
        self.checked += len(records)
        for name, track in self._memory.tracks.items():
            pending, ready = track.pending, name == "ready"
            for record in records:
                depth, produced = record.feature_depth, record.plan_position + record.feature_depth
                if ready:
                    depth, produced = record.ready_depth, produced + record.ready_depth
                while pending and produced >= pending[0][0] + _IN_FLIGHT:
                    _, step, earlier = pending.pop(0)
                    track.filling.append((step, earlier))
                    if len(track.filling) >= track.per_block:
                        self._end_block(name, track, context)
                if len(pending) < _MAX_PENDING:
                    pending.append((produced, record.step, depth))
        return len(records)

    def _end_block(self, name: str, track: QueueTrack, context: RunContext) -> None:
        mean = sum(value for _, value in track.filling) / len(track.filling)
        track.blocks.append(Block(mean, track.filling[0][0], track.filling[-1][0]))
        track.filling = []
        track.since_test += 1
        if len(track.blocks) == self._window - self._window % 2:
            pairs = zip(track.blocks[::2], track.blocks[1::2], strict=True)
            track.blocks = [Block((a.mean + b.mean) / 2, a.first_step, b.last_step) for a, b in pairs]
            track.per_block *= 2
        if track.since_test >= _TEST_EVERY:
            track.since_test = 0
            self._test(name, track, context)

    def _test(self, name: str, track: QueueTrack, context: RunContext) -> None:
        means = [block.mean for block in track.blocks]
        if track.per_block == 1:  # too short a history to tell a settled level from the filling of the queue
            return
        track.settled = percentile(means, _SETTLED_PERCENTILE)
        start = next(i for i, mean in enumerate(means) if mean >= _FILLED_FRAC * track.settled)
        tested = means[start:]
        if track.settled < self._min_level or len(tested) < _MIN_BLOCKS:
            return
        p = mann_kendall_decline_p(tested)
        full = max(i for i, mean in enumerate(means) if mean >= _FILLED_FRAC * track.settled)
        # A fall too late in a long history to tilt the whole of it.
        may_fall_late = len(means) - full > _LATE_BLOCKS and track.per_block >= _DRAWN_OUT_BLOCK
        if p >= self._p and not may_fall_late and track.open_decline is None:
            return  # as nearly always, and before the costly slope
        slope, fitted = theil_sen(tested)
        newest = means[-_LEVEL_BLOCKS:]
        # The fitted line ahead of the mean, which lags, but never below what was really seen.
        level = max(min(newest), min(fitted, sum(newest) / len(newest)))
        last_step = track.blocks[-1].last_step
        steps_per_block = (last_step - track.blocks[start].first_step + 1) / len(tested)
        falls = p < self._p and slope < 0
        steady = falls
        if not falls and may_fall_late:
            late = mann_kendall_decline_p(means[full:])
            falls, slope = late < self._p, min(slope, (means[-1] - means[full]) / (len(means) - 1 - full))
            p = min(p, late)
        empty_step = last_step + level / -slope * steps_per_block if falls else None
        low = level < self._level_frac * track.settled
        # Half way to the level: a trend that leads nowhere yet is not worth a warning, however significant.
        sinks = level < (1 + self._level_frac) / 2 * track.settled
        horizon = min(context.total_steps or 0, last_step + _FURTHEST * (last_step - track.blocks[start].first_step))
        runs_dry = steady and empty_step is not None and empty_step < horizon and track.per_block >= _DRAWN_OUT_BLOCK
        if falls and (low or (sinks and runs_dry)):
            onset = track.blocks[full].last_step
            self._decline(name, track, steps=(onset, onset, last_step), level=level, p=p, empty_step=empty_step)
        elif track.open_decline is not None and not sinks:
            self.findings.amend(track.open_decline, resolved_step=last_step)
            track.open_decline = None

    def _decline(
        self, name: str, track: QueueTrack, *, steps: tuple[int, int, int], level: float, p: float, empty_step: float | None
    ) -> None:
        message = f"queue '{name}' falls from {track.settled:.0f} to {level:.0f} batches by step {steps[2]}"
        values: dict[str, Any] = {
            "queue": name,
            "settled": track.settled,
            "level": level,
            "mann_kendall_p": p,
            "empty_step": None if empty_step is None else round(empty_step),
        }
        if track.open_decline is None:
            track.open_decline = self._finding("warn", message, steps=steps)
        self.findings.amend(track.open_decline, last_step=steps[2], message=message, **values)
