"""The detectors together with what they share, and the way back: snapshots for the steps a run can start again from.

Invariant: after `rewind(s)` the panel is as it was before record s, if there is a snapshot of s; otherwise as near
before it as there is one, with all findings that rest on records before s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from dflash.health.lines import EventLine, StepLine
from dflash.records import Finding

SPARSE_STEPS = 4  # how often detectors of slow trends look


class PanelState(msgspec.Struct, frozen=True):
    """State of context and detectors, as plain values."""

    context: dict[str, Any]
    detectors: dict[str, dict[str, Any]]


class Snapshot(msgspec.Struct, frozen=True):
    """The state before record `step`, as JSON text: hardly ever needed, so it is carried along unread."""

    step: int
    state: str


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
        self._on_step = [each.on_step for each in looking if not each.sparse]
        self._on_some_steps = [each.on_step for each in looking if each.sparse]

    def see_step(self, record: StepLine) -> None:
        """Judge a live step record."""
        context = self.context
        context.see_step(record)
        for on_step in self._on_step:
            on_step(record, context)
        if record.step % SPARSE_STEPS == 0:
            for on_step in self._on_some_steps:
                on_step(record, context)
        context.judged.clear()

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
            self.snapshots.append(Snapshot(step, msgspec.json.encode(self.state()).decode()))
            del self.snapshots[: -self._snapshots_kept]

    def rewind(self, step: int) -> None:
        """Go back to before record `step`."""
        found = {detector.name: detector.findings for detector in self.detectors}
        while self.snapshots and self.snapshots[-1].step > step:
            self.snapshots.pop()
        if self.snapshots:
            self.load(msgspec.json.decode(self.snapshots[-1].state, type=PanelState))
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

    def load(self, state: PanelState) -> None:
        """Go to a state."""
        self.context = msgspec.convert(state.context, RunContext, str_keys=True)
        load_states(self.detectors, state.detectors)


def states_of(detectors: Sequence[Detector]) -> dict[str, dict[str, Any]]:
    """States of several detectors by name."""
    return {detector.name: detector.state() for detector in detectors}


def load_states(detectors: Sequence[Detector], states: Mapping[str, Mapping[str, Any]]) -> None:
    """Load states made by `states_of`."""
    for detector in detectors:
        detector.load(states[detector.name])
