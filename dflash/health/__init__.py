"""Log health: whether a run is healthy, from its log alone, and what to do if it is not."""

from __future__ import annotations

from dflash.health.check import HealthChecker
from dflash.health.decision import Remedy, critical_training_spans, damage_of
from dflash.health.reader import LogCursor, ReadResult, read_new, start_cursor
from dflash.health.report import render_text, write_report
from dflash.health.run import check_run
from dflash.health.series import SeriesPoint, judge_series

__all__ = [
    "HealthChecker",
    "LogCursor",
    "ReadResult",
    "Remedy",
    "SeriesPoint",
    "check_run",
    "critical_training_spans",
    "damage_of",
    "judge_series",
    "read_new",
    "render_text",
    "start_cursor",
    "write_report",
]
