"""Short ways from simulated records to a health report, shared by the tests of the health room."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec

from dflash.config import CheckpointConfig, Config, HealthConfig, RollbackConfig, TrainConfig, parse_config
from dflash.health import HealthChecker
from dflash.health.detectors.schedule import scheduled_lr
from dflash.health.lines import EventLine, LogItem, StepLine
from dflash.records import (
    Damage,
    DetectorSummary,
    EventRecord,
    Finding,
    HealthReport,
    LedgerEntry,
    RollbackPlan,
    SavedState,
    StepRecord,
)
from dflash.rollback import Situation, decide
from tests.support.log_simulator import START_S, STEP_S, Record, simulate_run

HEALTH, TRAIN, CHECKPOINT = HealthConfig(), TrainConfig(), CheckpointConfig()
CLEAN_STEPS = (0, 200, 400, 600)
ROLLBACK = RollbackConfig(max_skip_frac=1.0)


def remedy(damage: Damage, *, clean_steps: Sequence[int] = CLEAN_STEPS) -> RollbackPlan | None:
    """What the rollback room says of damage in a run whose checkpoints at `clean_steps` are clean."""
    situation = Situation(
        run="simulated",
        ledger=[LedgerEntry(step, 0, "clean", "", "") for step in clean_steps],
        saved={step: SavedState(0, step) for step in clean_steps},
        batches_per_epoch=10_000,
        alive=True,
        now_s=0.0,
    )
    return decide(damage, situation, rule=ROLLBACK)


def config() -> Config:
    """A whole configuration with the default thresholds."""
    return parse_config("target: {mask_token_id: 1}\ndata: {num_conversations: 10}\n", origin="test")


@functools.cache
def healthy(*, seed: int, steps: int) -> tuple[Record, ...]:
    """A healthy run that follows the configured schedule."""
    return tuple(simulate_run(seed=seed, steps=steps, lr=lambda step: scheduled_lr(TRAIN, step, total=steps)))


def items_of(records: Sequence[Record]) -> list[LogItem]:
    """Records as the reader gives them (a test of the reader shows that bytes give the same)."""
    kinds = {StepRecord: StepLine, EventRecord: EventLine}
    return [msgspec.convert(record, kinds[type(record)], from_attributes=True) for record in records]


def new_checker() -> HealthChecker:
    """A checker with the default thresholds."""
    return HealthChecker(HEALTH, TRAIN, CHECKPOINT)


def end_of(records: Sequence[Record]) -> float:
    """Wall time just behind the last record."""
    return max(record.wall_time_s for record in records) + STEP_S


def judged(records: Sequence[Record], *, ended: bool = True, later_s: float = 0.0) -> HealthReport:
    """The report on a whole log."""
    checker = new_checker()
    checker.feed(items_of(records))
    return checker.report(run="simulated", now_s=end_of(records) + later_s, ended=ended, remedy=remedy)


def found(report: HealthReport, detector: str, *, severity: str | None = None) -> list[Finding]:
    """Findings of one detector."""
    return [f for f in report.findings if f.detector == detector and severity in (None, f.severity)]


def summary_of(report: HealthReport, detector: str) -> DetectorSummary:
    """What one detector says that it checked."""
    return next(row for row in report.detectors if row.detector == detector)


def steps_of(records: Sequence[Record]) -> list[StepRecord]:
    """The step records alone."""
    return [record for record in records if isinstance(record, StepRecord)]


__all__ = [
    "CHECKPOINT",
    "HEALTH",
    "START_S",
    "TRAIN",
    "config",
    "end_of",
    "found",
    "healthy",
    "items_of",
    "judged",
    "new_checker",
    "remedy",
    "steps_of",
    "summary_of",
]
