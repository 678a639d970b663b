"""The streaming checker: log items in, a report out, with a state that can be saved at any moment.

Invariant: the report depends on the items (and the clock handed in), never on how they were cut into readings nor on
how often the state was saved and restored in between.

The hard decision: only live records count, so a segment that starts before the newest step takes the detectors back
to that step. Snapshots at the steps that a run can start again from (multiples of the save interval, begun saves,
starts of segments) make that exact without a second reading of the log.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from dflash.config import CheckpointConfig, HealthConfig, TrainConfig, section_hash
from dflash.errors import DataError
from dflash.health.causes import Surroundings, classified
from dflash.health.decision import Remedy, damage_of
from dflash.health.detectors import Integrity
from dflash.health.detectors.base import plain
from dflash.health.detectors.replay import Taken
from dflash.health.detectors.staleness import future_finding, silent_from_s, stale_finding, staleness_summary
from dflash.health.heap import uncollected
from dflash.health.history import History, keep_points
from dflash.health.lines import EventLine, LogItem, StepLine, TornLine
from dflash.health.live import LiveSteps
from dflash.health.panel import Panel, PanelState, Snapshot
from dflash.health.verdict import Evidence, judge
from dflash.records import SEGMENT_STARTS, Finding, HealthReport

STATE_VERSION = 4
_STRETCH_RECORDS = 256  # judged at once: long enough to be fast, short enough to stay in the processor's cache
_START_ANEW = "delete the state file: the log is then read from its beginning"
_SEVERITY_ORDER = {"critical": 0, "warn": 1, "info": 2}


class CheckerState(msgspec.Struct, frozen=True):
    """Everything a checker knows; `config` is the identity of what it judges by."""

    config: str
    live: LiveSteps
    panel: PanelState
    snapshots: list[Snapshot]
    taken: list[Taken]
    integrity: dict[str, Any]
    history: History
    replaced: bool


class HealthChecker:
    """Judges one run's log as it grows.

    Args:
        health: thresholds.
        train: the learning-rate schedule.
        checkpoint: save interval, and the window that a warning stays current for.
    """

    def __init__(self, health: HealthConfig, train: TrainConfig, checkpoint: CheckpointConfig) -> None:
        self._health, self._checkpoint = health, checkpoint
        self.config_hash = config_hash(health, train, checkpoint)
        self._integrity = Integrity()
        self._panel = Panel(health, train, checkpoint)
        self._live = LiveSteps()
        self._history = History()
        self._replaced = False
        self._interval_steps = checkpoint.interval_steps
        self._stretch: list[StepLine] = []  # arrived and not judged yet: never outlives a call of `feed`

    @property
    def history(self) -> History:
        """The curves for the report."""
        return self._history

    @property
    def findings_made(self) -> int:
        """How many findings there have ever been: while it stands still, a report says nothing new."""
        return self._integrity.findings.next_number + sum(each.findings.next_number for each in self._panel.detectors)

    def feed(self, items: Iterable[LogItem]) -> None:
        """Judge the next items of the log, in order."""
        with uncollected():
            self._feed(items)

    def _feed(self, items: Iterable[LogItem]) -> None:
        for item in items:
            if isinstance(item, StepLine):
                live = self._live
                step = item.step
                if step == live.last + 1 and item.segment == live.segment and not self._replaced:  # nearly all
                    if step % self._interval_steps == 0:
                        self._judge_stretch()
                        self._snapshot(step)
                    live.last = step
                    self._stretch.append(item)
                    if len(self._stretch) >= _STRETCH_RECORDS:
                        self._judge_stretch()
                else:
                    self._see_step(item)
                continue
            self._judge_stretch()
            if isinstance(item, EventLine):
                self._see_event(item)
            elif isinstance(item, TornLine):
                self._integrity.on_torn(item, self._live.last)
            else:
                self._integrity.on_replaced(item, self._live.last)
                self._replaced = True
        self._judge_stretch()

    def report(self, *, run: str, now_s: float, ended: bool, remedy: Remedy) -> HealthReport:
        """Judge what has been fed so far.

        Args:
            run: name of the run.
            now_s: wall time, in the log's clock.
            ended: the run is over, so silence is right.
            remedy: says what should be done about damage.
        """
        context, live = self._panel.context, self._live
        stale = stale_finding(self._health, context, now_s=now_s, ended=ended, last_step=live.last)
        future = future_finding(context, now_s=now_s, last_step=live.last)
        timely = [finding for finding in (stale, future) if finding is not None]
        findings = [*self._panel.findings(), *self._integrity.reported(), *timely]
        findings.sort(key=_order)
        findings, clusters = classified(findings, self._surroundings())
        evidence = Evidence(
            findings=findings,
            steps=context.steps,
            last_step=live.last,
            coverage_frac=self._coverage_frac(),
            loss_points=self._panel.loss.checked,
            learning=self._panel.loss.learning(),
            recent_steps=self._checkpoint.window_steps,
            min_coverage_frac=self._health.min_coverage_frac,
            ended=ended,
        )
        verdict, headline = judge(evidence)
        damage = damage_of(findings, segment=max(live.segment, 0), last_step=live.last)
        detectors = [detector.summary() for detector in (*self._panel.detectors, self._integrity)]
        detectors.append(staleness_summary(self._health, context, found=timely, ended=ended))
        return HealthReport(
            run=run,
            verdict=verdict,
            headline=headline,
            checked_at=iso_time(now_s),
            segment=max(live.segment, 0),
            first_step=0 if live.last >= 0 else None,
            last_step=live.last if live.last >= 0 else None,
            records=context.steps,
            coverage_frac=evidence.coverage_frac,
            detectors=tuple(detectors),
            findings=tuple(findings),
            damage=damage,
            decision=None if damage is None else remedy(damage),
            stats=self._stats() | {"clusters": [cluster.summary() for cluster in clusters]},
        )

    def silent_from_s(self, *, ended: bool) -> float | None:
        """Wall time from which silence is a finding, None if it is none however long it lasts."""
        return silent_from_s(self._health, self._panel.context, ended=ended)

    def packed(self) -> bytes:
        """The state as one packed value, without building its parts first: what a check after a few records costs most."""
        parts = {
            "config": self.config_hash,
            "live": self._live,
            "panel": self._panel.parts(),
            "snapshots": self._panel.snapshots,
            "taken": self._panel.repeated.taken,
            "integrity": self._integrity.parts(),
            "history": self._history,
            "replaced": self._replaced,
        }
        return msgspec.msgpack.encode(parts, enc_hook=plain)

    @classmethod
    def of_packed(cls, packed: bytes, health: HealthConfig, train: TrainConfig, checkpoint: CheckpointConfig) -> HealthChecker:
        """The checker that gave `packed`.

        Raises:
            DataError: the state is damaged, of another version, or was made with another configuration.
        """
        checker = cls(health, train, checkpoint)
        try:
            saved = msgspec.msgpack.decode(packed, type=CheckerState)
            if saved.config != checker.config_hash:
                raise DataError("the saved state belongs to another version or configuration", remedy=_START_ANEW)
            checker._panel.load(saved.panel)
            checker._integrity.load(saved.integrity)
        except (msgspec.DecodeError, RecursionError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"the saved state of the health check is damaged: {error}", remedy=_START_ANEW) from error
        checker._live, checker._history, checker._replaced = saved.live, saved.history, saved.replaced
        checker._panel.snapshots, checker._panel.repeated.taken = saved.snapshots, saved.taken
        return checker

    def _see_step(self, record: StepLine) -> None:
        step = record.step
        self._judge_stretch()
        if self._replaced:
            self._after_replacement(record.segment, step)
        if self._live.begins_segment(record.segment):
            self._begin_segment(record.segment, step)
        elif step % self._interval_steps == 0:
            self._snapshot(step)
        arrival = self._live.arrive(record.segment, step)
        self._integrity.on_arrival(record, arrival, self._panel.context)
        if arrival.kind in ("next", "gap"):
            self._judge((record,))

    def _judge_stretch(self) -> None:
        """Judge the records that have arrived one right behind the other and wait for it."""
        if self._stretch:
            records, self._stretch = self._stretch, []
            self._integrity.on_next(records)
            self._judge(records)

    def _judge(self, records: Sequence[StepLine]) -> None:
        self._history.see_stretch(records)
        panel, spike = self._panel, self._health.spike
        panel.see_stretch(records)
        keep_points(self._history.loss, panel.loss_points, limit_z=spike.loss_z)
        keep_points(self._history.grad_norm, panel.gradient_points, limit_z=spike.grad_z)

    def _see_event(self, event: EventLine) -> None:
        if self._replaced and event.event in SEGMENT_STARTS:
            self._after_replacement(event.segment, event.step)
        if event.event in SEGMENT_STARTS and self._live.begins_segment(event.segment):
            self._begin_segment(event.segment, event.step)
        if event.segment < self._live.segment:
            return
        if event.event == "save_begin":
            self._snapshot(event.step)
        self._panel.see_event(event)
        self._integrity.on_event(event)
        self._history.see_event(event)

    def _after_replacement(self, segment: int, step: int) -> None:
        """A log that goes on where the old one ended was rotated; any other is judged from nothing."""
        self._replaced = False
        goes_on = segment >= self._live.segment and step == self._live.last + 1
        if not goes_on:
            self._panel.start_anew()
            self._integrity.on_new_process()
            self._live, self._history = LiveSteps(), History()

    def _begin_segment(self, segment: int, step: int) -> None:
        first = self._live.segments == 0
        if step <= self._live.last:
            self._panel.rewind(step)
            self._history.rewind(step)
        self._live.begin_segment(segment, step)
        if not first:
            self._panel.new_process()
            self._integrity.on_new_process()
            self._integrity.on_segment(segment, step)
        self._snapshot(step)

    def _snapshot(self, step: int) -> None:
        if step == self._live.last + 1:
            self._panel.snapshot(step)

    def _coverage_frac(self) -> float:
        expected = self._live.last + 1
        return (self._live.covered() - self._panel.context.steps_without_loss) / expected if expected else 0.0

    def _surroundings(self) -> Surroundings:
        panel, health = self._panel, self._health
        return Surroundings(
            planned=panel.context.planned,
            planned_steps=health.rise.planned_steps,
            saves=panel.saves.figures(),
            saves_proven=panel.saves.is_proven(),
            near_save_steps=health.watch.save_near_steps,
            samples=panel.repeated.checked,
        )

    def _stats(self) -> dict[str, Any]:
        context, live = self._panel.context, self._live
        return {
            "segments": live.segments,
            "dead_records": live.dead,
            "total_steps": context.total_steps,
            "finished": context.finished,
            "counts": self._panel.simple.counts(),
            "longest_bucket_run": self._panel.run_length.longest,
            "buckets": {
                str(bucket): {"loss_median": math.exp(level.median), "log_loss_scale": level.scale, "tokens_per_batch": level.count}
                for bucket, level in self._panel.loss.levels().items()
            },
            "last": None if context.last is None else msgspec.to_builtins(context.last),
            "step_time_median_s": context.step_time_median_s(),
            "last_probe": None if not self._history.probes else msgspec.structs.asdict(self._history.probes[-1]),
        }


def config_hash(health: HealthConfig, train: TrainConfig, checkpoint: CheckpointConfig) -> str:
    """Identity of what a run is judged by: the thresholds, and the version of what is remembered."""
    return f"{STATE_VERSION}-{section_hash(health, train, checkpoint)}"


def iso_time(now_s: float) -> str:
    """Wall time as a report says it."""
    return datetime.fromtimestamp(now_s, UTC).isoformat(timespec="seconds")


def _order(finding: Finding) -> tuple[int, int, int, str, int]:
    bucket = -1 if finding.bucket is None else finding.bucket
    return _SEVERITY_ORDER[finding.severity], finding.onset_step, finding.first_step, finding.detector, bucket
