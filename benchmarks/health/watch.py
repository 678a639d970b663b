"""Watching a simulated run as a deployed checker does: a few records at a time, noting when each thing was first said."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from dflash.config import Config
from dflash.health import HealthChecker, critical_training_spans
from dflash.health.lines import LogItem, StepLine
from dflash.records import Damage, Finding, HealthReport, LedgerEntry, RollbackPlan, SavedState
from dflash.rollback import Situation, decide

CHUNK = 8


@dataclass(frozen=True)
class Said:
    """A finding as it stood in the last report, with the live step at which it was first reported."""

    finding: Finding
    seen_step: int


@dataclass(frozen=True)
class Watched:
    """What was said of one run, what was decided first, and the last report."""

    said: tuple[Said, ...]
    decision: RollbackPlan | None
    decided_step: int
    report: HealthReport


def clean_checkpoints(report: HealthReport, saves: Iterable[int], config: Config) -> list[int]:
    """Checkpoints whose window and soak are over and free of critical spans: what the ledger calls clean."""
    spans, last = critical_training_spans(report), report.last_step or 0
    window, soak = config.checkpoint.window_steps, config.checkpoint.soak_steps
    soaked = [save for save in saves if save == 0 or save + soak <= last]
    return [save for save in soaked if not any(first < save + soak and save - window <= end for first, end in spans) or save == 0]


def watch(items: Iterable[LogItem], config: Config, *, saves: list[int], positions_per_step: int) -> Watched:
    """Feed a run to a checker in small pieces."""
    checker = HealthChecker(config.health, config.train, config.checkpoint)
    first_seen: dict[tuple[str, str, int, int | None], int] = {}
    decision: RollbackPlan | None = None
    decided_step, now_s = -1, 0.0
    stream, reported = iter(items), -1
    while chunk := list(islice(stream, CHUNK)):
        checker.feed(chunk)
        now_s = max([now_s, *(item.wall_time_s for item in chunk if isinstance(item, StepLine))])
        if checker.findings_made == reported and all(isinstance(item, StepLine) for item in chunk):
            continue  # a report would say nothing new
        reported = checker.findings_made
        report = checker.report(run="simulated", now_s=now_s, ended=False, remedy=_wait)
        step = report.last_step or 0
        for finding in report.findings:
            first_seen.setdefault(_identity(finding), step)
        if report.damage is not None and decision is None:
            clean = clean_checkpoints(report, saves, config)
            decision = _remedy(clean, config, positions_per_step)(report.damage)
            decided_step = step
    report = checker.report(run="simulated", now_s=now_s, ended=True, remedy=_wait)
    said = tuple(Said(finding, first_seen.get(_identity(finding), report.last_step or 0)) for finding in report.findings)
    return Watched(said, decision, decided_step, report)


def _identity(finding: Finding) -> tuple[str, str, int, int | None]:
    return finding.detector, finding.severity, finding.first_step, finding.bucket


def _wait(_damage: Damage) -> None:
    return None


def _remedy(clean: list[int], config: Config, positions_per_step: int) -> Callable[[Damage], RollbackPlan | None]:
    situation = Situation(
        run="simulated",
        ledger=[LedgerEntry(step, 0, "clean", "", "") for step in clean],
        saved={step: SavedState(0, step * positions_per_step) for step in clean},
        batches_per_epoch=100_000,
        alive=True,
        now_s=0.0,
    )
    return lambda damage: decide(damage, situation, rule=config.rollback)
