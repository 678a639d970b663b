"""Log health: whether a run is healthy, from its log alone, and what to do if it is not."""

from __future__ import annotations

from dflash.health.check import HealthChecker
from dflash.health.decision import Remedy, critical_findings, critical_training_spans, damage_of
from dflash.health.explain import explain
from dflash.health.foreign import ForeignLog, NoLossError
from dflash.health.foreign_documents import history_rows
from dflash.health.foreign_fields import FieldMap, parse_map
from dflash.health.foreign_rows import HEAD_BYTES, read_rows, sniff
from dflash.health.foreign_values import Rows
from dflash.health.history import History
from dflash.health.lines import EventLine, LogItem
from dflash.health.narrow import narrowed
from dflash.health.reader import LogCursor, ReadResult, read_new, read_new_from, start_cursor
from dflash.health.report import PICTURES_FOLDER, render_html, render_text, write_report
from dflash.health.run import check_run, checker_of
from dflash.health.series import SeriesJudge, SeriesPoint
from dflash.health.sources import LocalLog, LogSource, Piece, blocks_of

__all__ = [
    "HEAD_BYTES",
    "PICTURES_FOLDER",
    "EventLine",
    "FieldMap",
    "ForeignLog",
    "HealthChecker",
    "History",
    "LocalLog",
    "LogCursor",
    "LogItem",
    "LogSource",
    "NoLossError",
    "Piece",
    "ReadResult",
    "Remedy",
    "Rows",
    "SeriesJudge",
    "SeriesPoint",
    "blocks_of",
    "check_run",
    "checker_of",
    "critical_findings",
    "critical_training_spans",
    "damage_of",
    "explain",
    "history_rows",
    "narrowed",
    "parse_map",
    "read_new",
    "read_new_from",
    "read_rows",
    "render_html",
    "render_text",
    "sniff",
    "start_cursor",
    "write_report",
]
