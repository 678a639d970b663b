"""The detectors together with what they share, and the way back: snapshots for the steps a run can start again from.

Invariant: after `rewind(s)` the panel is as it was before record s, if there is a snapshot of s; otherwise as near
before it as there is one, with all findings that rest on records before s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dflash.config import CheckpointConfig, HealthConfig, TrainConfig
from dflash.health.baseline import Level
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

    Attributes:
        loss_points, gradient_points: of the records judged last, for the curves; see `LossSpike` and `GradSpike`.
    """

    def __init__(self, health: HealthConfig, train: TrainConfig, checkpoint: CheckpointConfig) -> None:
        self._config = (health, train)
        self._snapshots_kept = checkpoint.keep_clean + checkpoint.keep_other + 1
        self.loss_points: list[tuple[int, int, float, Level | None]] = []
        self.gradient_points: list[tuple[str, int, float, Level | None]] = []
        self.start_anew()

    def start_anew(self) -> None:
        """Forget everything."""
        self.snapshots: list[Snapshot] = []
        self._clear()

    def _clear(self) -> None:
        health, train = self._config
        self.context = RunContext()
        self.gradient = GradSpike(health.spike)
        self.loss = LossSpike(health.spike, health.rise)
        self.rise = SustainedRise(health.rise)
        self.run_length = RunLength(health)
        self.saves = SaveCorrelation(health.watch)
        self.mix = BucketMix(health.watch)
        self.simple = SimpleRules(health)
        self.repeated = RepeatedData()
        self.detectors: list[Detector] = [
            NonFinite(health),
            self.gradient,  # before the loss, which asks what led it
            self.loss,  # before all that look at its judgement of the record
            self.rise,
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
        looking = [each for each in self.detectors if type(each).on_stretch is not Detector.on_stretch]
        self._following = [each for each in looking if each.follows]
        self._ahead = [each for each in looking if not each.follows and each not in (self.gradient, self.loss)]

    def see_step(self, record: StepLine) -> None:
        """Judge a live step record."""
        self.see_stretch((record,))

    def see_stretch(self, records: Sequence[StepLine]) -> None:
        """Judge consecutive live step records, at least one, without an event between them.

        As many at once as leave the order of judgement as it is record by record: where what one detector says of a record
        can change what another says of a later one, they are cut there.
        """
        context, gradient, loss, following = self.context, self.gradient, self.loss, self._following
        self.loss_points, self.gradient_points = [], []
        context.see_stretch(records)
        self._go_ahead(records)
        one_by_one = self.rise.may_explain(context, from_step=records[0].step)
        done = led = 0
        while done < len(records):
            if led == done:
                led += gradient.on_stretch(records[done:], context)
                self.gradient_points += gradient.drawn
            judged = records[done : done + 1 if one_by_one else led]
            judged = judged[: loss.on_stretch(judged, context)]
            self.loss_points += loss.drawn
            for detector in following:
                detector.on_stretch(judged, context)
            context.judged.clear()
            done += len(judged)
        context.forget_old()

    def _go_ahead(self, records: Sequence[StepLine]) -> None:
        """Let those judge that do not ask what the others say of a record."""
        some = [record for record in records if record.step % SPARSE_STEPS == 0]
        for detector in self._ahead:
            looked_at = some if detector.sparse else records
            if looked_at:
                for record in looked_at[detector.on_stretch(looked_at, self.context) :]:
                    detector.on_step(record, self.context)

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
            self.load(msgspec.msgpack.decode(newest.state, type=PanelState))
            self.repeated.give_back([*taken, *newest.taken])
            newest.taken = []
        else:
            self._clear()
        if not self.snapshots or self.snapshots[-1].step < step:
            for detector in self.detectors:
                detector.findings = found[detector.name]
                detector.findings.keep_before(step)

    def parts(self) -> dict[str, Any]:
        """Everything but the snapshots, still shared with the panel: to be encoded at once."""
        return {"context": self.context, "detectors": {detector.name: detector.parts() for detector in self.detectors}}

    def load(self, state: PanelState) -> None:
        """Go to a state."""
        self.context = msgspec.convert(state.context, RunContext)
        for detector in self.detectors:
            detector.load(state.detectors[detector.name])
