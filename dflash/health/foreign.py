"""The verdict on somebody else's training log: rows in, a report out, by the same detectors as ours.

Invariant: windows are counted in records, because such a log often holds every k-th step; what is shown to people is in
the log's own steps. What cannot be known from such a log (what was consumed, saves, queues) is said not to be checked.

Three hard decisions. Records without a loss behind the last one that has one were not logged, whatever they hold. The
text "nan" is a value that was not finite only in a record that carries some other number: a record of nothing but
"nan" was not logged. And no decision is ever made: there is no checkpoint that could be gone back to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain, islice
from typing import Any

from dflash.config import HealthConfig
from dflash.errors import EXIT_BLIND, DataError
from dflash.health.decision import damage_of
from dflash.health.detectors.staleness import FUTURE_S
from dflash.health.foreign_fields import FieldMap, guess_fields
from dflash.health.foreign_values import ABSENT, NONFINITE, SPELT_NAN, Row, Rows, Value, step_of, value_of
from dflash.health.history import Curve, History
from dflash.health.series import SeriesJudge, SeriesPoint
from dflash.health.step_numbers import StepNumbers
from dflash.health.verdict import Evidence, judge
from dflash.records import DetectorSummary, Finding, HealthReport, Severity

GUESS_ROWS = 500
"""Records whose field names the mapping is guessed from."""

_INTEGRITY = "step integrity"
_SHOWN_NAMES = 12


@dataclass(slots=True)
class _Count:
    """What the reading met."""

    records: int = 0
    with_loss: int = 0
    informative: int = 0  # number of the last record that says anything of the loss, plus one
    negative: int = 0
    backwards: list[tuple[int, int, int]] = field(default_factory=list)  # (record, step before, step)
    repeated: int = 0
    spelt: int = 0
    newest_s: float | None = None


class ForeignLog:
    """Reads and judges one log.

    Args:
        rows: what its reader fills on the way.
        given: fields that a person named.
        health: thresholds.
        origin: name of the log, for errors.
    """

    def __init__(self, rows: Rows, *, given: FieldMap, health: HealthConfig, origin: str) -> None:
        self._rows, self._given, self._health, self._origin = rows, given, health, origin
        self._judge = SeriesJudge(health)
        self._steps = StepNumbers()
        self._count = _Count()
        self.fields = given
        self.history = History(loss={0: Curve()}, grad_norm={"0": Curve()})
        self._lr: float | None = None
        self._loss: float | None = None

    def read(self, records: Iterable[Row]) -> None:
        """Judge every record.

        Raises:
            DataError: a field that was named does not exist, or no field looks like a loss.
        """
        iterator = iter(records)
        first = list(islice(iterator, GUESS_ROWS))
        names = dict.fromkeys(
            name for row in first for name, raw in row.items() if value_of(raw) is not ABSENT or _seconds(raw) is not None
        )
        if not first:
            return
        self.fields = guess_fields(names, given=self._given, origin=self._origin)
        if self.fields.loss is None:
            shown = ", ".join(repr(name) for name in list(names)[:_SHOWN_NAMES]) or "none that hold numbers"
            raise NoLossError(
                f"{self._origin} has no field that looks like a training loss; its fields: {shown}",
                remedy="name it, e.g. --map loss=train/ce,step=global_step",
            )
        for row in chain(first, iterator):
            self._see(row)

    def _see(self, row: Row) -> None:
        fields, count = self.fields, self._count
        if fields.loss not in row and (fields.grad_norm is None or fields.grad_norm not in row):
            return  # a record of something else: an evaluation, the machine
        step = self._step(row)
        if step is None:
            return
        if self._rows.spelt_is_absent and SPELT_NAN in (
            value_of(row.get(name)) for name in (fields.loss, fields.grad_norm) if name
        ):
            count.spelt += 1
            return
        alive = self._says_something(row)
        loss, loss_lost = self._reading(row.get(fields.loss or ""), alive=alive)
        grad_norm, grad_lost = self._reading(None if fields.grad_norm is None else row.get(fields.grad_norm), alive=alive)
        self._steps.append(step)
        count.records += 1
        if loss is not None or loss_lost:
            count.with_loss += 1
            count.informative = count.records
        lost = tuple(name for name, is_lost in (("ce", loss_lost), ("grad_norm", grad_lost)) if is_lost)
        self._judge.feed(SeriesPoint(loss, grad_norm, lost))
        self._remember(step, loss, grad_norm, row)

    def _step(self, row: Row) -> int | None:
        """The record's step, numbered on where the log has none; None for one that cannot be."""
        count = self._count
        name = self.fields.step
        before = self._steps.of(len(self._steps)) if len(self._steps) else None
        step = step_of(row.get(name)) if name is not None else None
        if step is None:
            return 0 if before is None else before + 1
        if step < 0:
            count.negative += 1
            return None
        if before is not None and step < before:
            count.backwards.append((len(self._steps), before, step))
        elif before is not None and step == before:
            count.repeated += 1
        return step

    def _says_something(self, row: Row) -> bool:
        known = {name for _, name in self.fields.pairs() if name != self.fields.lr}
        return any(isinstance(value_of(raw), float) for name, raw in row.items() if name not in known and name != "epoch")

    def _reading(self, raw: Any, *, alive: bool) -> tuple[float | None, bool]:
        """(value, whether it was not finite) of a field."""
        value: Value = value_of(raw)
        if isinstance(value, float):
            return value, False
        lost = value == NONFINITE or (value == SPELT_NAN and alive and not self._rows.spelt_is_absent)
        return None, lost

    def _remember(self, step: int, loss: float | None, grad_norm: float | None, row: Row) -> None:
        curves = (
            (self.history.loss[0], loss, self._judge.loss_band),
            (self.history.grad_norm["0"], grad_norm, self._judge.gradient_band),
        )
        for curve, value, band in curves:
            if value is not None and curve.wants_next():
                curve.keep(step, value, band=band())
        if loss is not None:
            self._loss = loss
        if self.fields.lr is not None and isinstance(lr := value_of(row.get(self.fields.lr)), float):
            self._lr = lr
        if self.fields.time is not None:
            seconds = _seconds(row.get(self.fields.time))
            if seconds is not None:
                self._count.newest_s = seconds

    def report(self, *, run: str, now_s: float, recent_records: int) -> HealthReport:
        """Judge what was read.

        Args:
            run: name of the log for the report.
            now_s: wall time.
            recent_records: how far back a warning still counts.
        """
        count = self._count
        findings = sorted(self._judge.findings(), key=_order) + self._integrity(now_s)
        expected = count.informative
        evidence = Evidence(
            findings=findings,
            steps=expected,
            last_step=expected - 1,
            coverage_frac=count.with_loss / expected if expected else 0.0,
            loss_points=self._judge.losses_judged,
            learning=0,
            recent_steps=recent_records,
            min_coverage_frac=self._health.min_coverage_frac,
            ended=True,
        )
        verdict, headline = judge(evidence)
        shown = [self._steps.in_steps(finding) for finding in findings]
        return HealthReport(
            run=run,
            verdict=verdict,
            headline=self._steps.in_text(headline)
            .replace(" steps checked", " records checked")
            .replace(" steps, too few", " records, too few"),
            checked_at=datetime.fromtimestamp(now_s, UTC).isoformat(timespec="seconds"),
            segment=0,
            first_step=self._steps.of(0) if expected else None,
            last_step=self._steps.of(expected - 1) if expected else None,
            records=count.records,
            coverage_frac=evidence.coverage_frac,
            detectors=(*self._judge.summaries(), self._integrity_summary(findings)),
            findings=tuple(shown),
            damage=damage_of(shown, segment=0, last_step=self._steps.of(expected - 1)),
            decision=None,
            stats=self._stats(),
        )

    def _integrity(self, now_s: float) -> list[Finding]:
        count, found = self._count, []
        if count.backwards:
            record, before, step = count.backwards[0]
            text = (
                f"the log goes back from {before} to {step}: a restart, or several runs in one file ({len(count.backwards)} times)"
            )
            found.append(_noted("warn", text, record=record))
        if count.negative:
            found.append(_noted("warn", f"{count.negative} records have a negative step and are left out", record=0))
        if self._rows.unreadable:
            found.append(_noted("info", f"{self._rows.unreadable} lines are no records and are left out", record=0))
        if count.repeated:
            found.append(_noted("info", f"{count.repeated} records repeat the step before them", record=0))
        missing = count.informative - count.with_loss
        if missing:
            found.append(_noted("info", f"{missing} records have no loss", record=0))
        if count.spelt:
            text = f'{count.spelt} records say "nan" in words: not logged, which is not the same as NaN'
            found.append(_noted("info", text, record=max(count.records - 1, 0)))
        behind = count.records - count.informative
        if behind:
            text = f"the last {behind} records hold no loss: they were not logged, which is not the same as NaN"
            found.append(_noted("info", text, record=count.informative))
        if count.newest_s is not None and count.newest_s > now_s + FUTURE_S:
            text = f"the newest record is dated {count.newest_s - now_s:.0f} s in the future: two clocks disagree"
            found.append(_noted("warn", text, record=count.records - 1))
        return found

    def _integrity_summary(self, findings: list[Finding]) -> DetectorSummary:
        own = [finding for finding in findings if finding.detector == _INTEGRITY]
        return DetectorSummary(
            detector=_INTEGRITY,
            rule="every line is a record, steps go forward, every record has a loss, no record comes from the future",
            checked=self._count.records,
            findings=len(own),
            critical=0,
            note="such a log does not say when it was saved, or what was consumed: neither is checked",
        )

    def _stats(self) -> dict[str, Any]:
        return {
            "foreign": {
                "format": self._rows.format,
                "fields": dict(self.fields.pairs()),
                "given": list(self.fields.given),
                "notes": sorted(set(self._rows.notes)),
                "unreadable": self._rows.unreadable,
            },
            "last": {"ce": self._loss, "lr": self._lr},
        }


class NoLossError(DataError):
    """No field of the log is the loss: nothing can be judged, and blind is not healthy."""

    exit_code = EXIT_BLIND


def _noted(severity: Severity, message: str, *, record: int) -> Finding:
    return Finding(
        detector=_INTEGRITY, severity=severity, domain="operations", message=message, first_step=record, last_step=record,
        onset_step=record, bucket=None, values={}, batch_ids=(),
    )  # fmt: skip


def _order(finding: Finding) -> tuple[int, int, str]:
    return {"critical": 0, "warn": 1, "info": 2}[finding.severity], finding.onset_step, finding.detector


def _seconds(raw: Any) -> float | None:
    """Seconds since 1970 of a time stamp in seconds, milliseconds or ISO 8601; None for any other."""
    value = value_of(raw)
    if isinstance(value, float):
        seconds = value / 1000 if value > 1e11 else value
        return seconds if seconds > 1e9 else None  # smaller numbers are seconds since the run began
    if isinstance(raw, str) and 10 <= len(raw) <= 40:
        try:
            parsed = datetime.fromisoformat(raw)
        except ValueError:
            return None
        return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    return None
