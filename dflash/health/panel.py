"""The detectors together with what they share, and the way back: snapshots for the steps a run can start again from.

Invariant: after `rewind(s)` the panel is as it was before record s, if there is a snapshot of s; otherwise as near
before it as there is one, with all findings that rest on records before s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from dflash.config import CheckpointConfig, HealthConfig, TrainConfig
from dflash.health.context import RunContext
from dflash.health.detectors import (
    AccuracyDrop,
    BadResume,
    BucketMix,
    DeadMetric,
    Detector,
    Divergence,
    GradientExplosion,
    GradSpike,
    LossSpike,
    NonFinite,
    QueueDecline,
    RepeatedData,
    RunLength,
    SaveCorrelation,
    SaveFailure,
    SaveStall,
    Schedule,
    ShareDrift,
    ShortWindow,
    SimpleRules,
    SustainedRise,
    TargetBalance,
    Throughput,
)
from dflash.health.detectors.base import plain
from dflash.health.detectors.replay import Taken
from dflash.health.lines import EventLine, StepLine
from dflash.records import Finding

SPARSE_STEPS = 4  # how often detectors of slow trends look


class PanelState(msgspec.Struct, frozen=True):
    """State of context and detectors, as plain values."""

    context: dict[str, Any]
    detectors: dict[str, dict[str, Any]]


class Snapshot(msgspec.Struct):
    """The state before record `step`, packed: made all the time and hardly ever needed, so it is carried along unread.

    Attributes:
        epoch: of the data, then.
        taken: samples consumed between this snapshot and the next; those since the newest are the detector's.
    """

    step: int
    state: bytes
    epoch: int
    taken: list[Taken]


class Panel:
    """All detectors that judge live records.

    Args:
        health: thresholds.
        train: the learning-rate schedule.
        checkpoint: how many checkpoints a run may go back over.
    """

    def __init__(self, health: HealthConfig, train: TrainConfig, checkpoint: CheckpointConfig) -> None:
        self._config = (health, train)
        self._snapshots_kept = checkpoint.keep_clean + checkpoint.keep_other + 1
        self.snapshots: list[Snapshot] = []
        self._clear()

    def _clear(self) -> None:
        health, train = self._config
        self.context = RunContext()
        self.gradient = GradSpike(health.spike)
        self.loss = LossSpike(health.spike, health.rise)
        self.run_length = RunLength(health)
        self.saves = SaveCorrelation(health.watch)
        self.mix = BucketMix(health.watch)
        self.simple = SimpleRules(health)
        self.repeated = RepeatedData()
        self.detectors: list[Detector] = [
            NonFinite(health),
            self.gradient,  # before the loss, which asks what led it
            self.loss,  # before all that look at its judgement of the record
            SustainedRise(health.rise),
            Divergence(health.rise),
            BadResume(health.watch),
            self.repeated,
            AccuracyDrop(health.watch),
            GradientExplosion(health.watch),
            Schedule(health, train),
            self.run_length,
            ShareDrift(health.watch),
            self.mix,
            ShortWindow(health.spike, health.watch),
            self.saves,
            SaveFailure(),
            SaveStall(health.watch),
            QueueDecline(health),
            TargetBalance(health.watch),
            Throughput(health.watch),
            DeadMetric(health.watch),
            self.simple,
        ]
        looking = [each for each in self.detectors if type(each).on_step is not Detector.on_step]
        self._ahead = [each for each in looking if type(each).on_stretch is not Detector.on_stretch]
        self._on_step = [each.on_step for each in looking if each not in self._ahead]

    def see_step(self, record: StepLine) -> None:
        """Judge a live step record."""
        self.see_stretch((record,), after=_nothing)

    def see_stretch(self, records: Sequence[StepLine], *, after: Callable[[StepLine], None]) -> None:
        """Judge consecutive live step records without an event between them.

        Args:
            records: at least one.
            after: called with each record once it has been judged.
        """
        context = self.context
        context.see_totals(records)
        left = [(done, detector.on_step) for detector, done in self._go_ahead(records) if done < len(records)]
        judged, see_recent, each_step = context.judged, context.see_recent, self._on_step
        for number, record in enumerate(records):
            see_recent(record)
            for on_step in each_step:
                on_step(record, context)
            for done, on_step in left:
                if number >= done:
                    on_step(record, context)
            judged.clear()
            after(record)

    def _go_ahead(self, records: Sequence[StepLine]) -> list[tuple[Detector, int]]:
        """Detectors that can judge records without knowing what the others say of each, and how many they have judged."""
        some = [record for record in records if record.step % SPARSE_STEPS == 0]
        reached: list[tuple[Detector, int]] = []
        for detector in self._ahead:
            if not detector.sparse:
                reached.append((detector, detector.on_stretch(records, self.context)))
            elif some:
                detector.on_stretch(some, self.context)  # these never stop
        return reached

    def see_event(self, event: EventLine) -> None:
        """Judge an event."""
        self.context.see_event(event)
        for detector in self.detectors:
            detector.on_event(event)

    def new_process(self) -> None:
        """A new segment begins: what belonged to the previous process is over."""
        self.context.new_process()
        for detector in self.detectors:
            detector.on_new_process()

    def findings(self) -> list[Finding]:
        """What all detectors have found so far."""
        return [finding for detector in self.detectors for finding in detector.reported()]

    def snapshot(self, step: int) -> None:
        """Remember the state before record `step`; only as many as there are checkpoints to go back to."""
        if not self.snapshots or self.snapshots[-1].step < step:
            if self.snapshots:
                self.snapshots[-1].taken += self.repeated.taken
            self.repeated.taken = []
            parts = {"context": self.context, "detectors": {each.name: each.light_parts() for each in self.detectors}}
            self.snapshots.append(Snapshot(step, msgspec.msgpack.encode(parts, enc_hook=plain), self.repeated.epoch, []))
            del self.snapshots[: -self._snapshots_kept]
            self.repeated.forget_epochs_before(self.snapshots[0].epoch)

    def rewind(self, step: int) -> None:
        """Go back to before record `step`."""
        found = {detector.name: detector.findings for detector in self.detectors}
        taken = self.repeated.taken
        while self.snapshots and self.snapshots[-1].step > step:
            taken += self.snapshots.pop().taken
        if self.snapshots:
            newest = self.snapshots[-1]
            self.load(msgspec.msgpack.decode(newest.state, type=PanelState, strict=False))
            self.repeated.give_back([*taken, *newest.taken])
            newest.taken = []
        else:
            self._clear()
        if not self.snapshots or self.snapshots[-1].step < step:
            for detector in self.detectors:
                detector.findings = found[detector.name]
                detector.findings.keep_before(step)

    def state(self) -> PanelState:
        """Everything but the snapshots."""
        context: dict[str, Any] = msgspec.to_builtins(self.context, str_keys=True)
        return PanelState(context, states_of(self.detectors))

    def parts(self) -> dict[str, Any]:
        """What the state is made of, still shared with the panel: to be encoded at once."""
        return {"context": self.context, "detectors": {detector.name: detector.parts() for detector in self.detectors}}

    def load(self, state: PanelState) -> None:
        """Go to a state."""
        self.context = msgspec.convert(state.context, RunContext, str_keys=True)
        load_states(self.detectors, state.detectors)


def _nothing(_record: StepLine) -> None:
    """What follows a single record that is judged by itself."""


def states_of(detectors: Sequence[Detector]) -> dict[str, dict[str, Any]]:
    """States of several detectors by name."""
    return {detector.name: detector.state() for detector in detectors}


def load_states(detectors: Sequence[Detector], states: Mapping[str, Mapping[str, Any]]) -> None:
    """Load states made by `states_of`."""
    for detector in detectors:
        detector.load(states[detector.name])
