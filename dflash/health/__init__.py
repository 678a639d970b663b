"""Log health: whether a run is healthy, from its log alone, and what to do if it is not."""

from __future__ import annotations

from dflash.health.check import HealthChecker
from dflash.health.decision import critical_training_spans, decide
from dflash.health.reader import LogCursor, ReadResult, read_new, start_cursor
from dflash.health.report import render_text, write_report
from dflash.health.run import check_run
from dflash.health.series import SeriesPoint, judge_series

__all__ = [
    "HealthChecker",
    "LogCursor",
    "ReadResult",
    "SeriesPoint",
    "check_run",
    "critical_training_spans",
    "decide",
    "judge_series",
    "read_new",
    "render_text",
    "start_cursor",
    "write_report",
]
