"""The check of one run's folder: read what is new, judge, write the report. The only place here that touches files.

Invariant: the run itself is never changed; everything written lies under `health/` and replaces its predecessor
atomically. A damaged or outdated state costs one full reading of the log, never a wrong verdict.
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from dflash.config import Config
from dflash.errors import DataError
from dflash.health.check import HealthChecker
from dflash.health.decision import Remedy
from dflash.health.files import write_atomically
from dflash.health.reader import LogCursor, read_new, start_cursor
from dflash.health.report import write_json, write_report
from dflash.records import HealthReport, RunPaths, to_json

logger = logging.getLogger(__name__)

BLOCK_BYTES = 4 * 2**20  # one reading: bounds memory, however large the log


class SavedCheck(msgspec.Struct):
    """`state.json`: the checker's state, how far the log was read, when the report was drawn and what it showed."""

    checker: dict[str, Any]
    cursor: LogCursor
    drawn_at_s: float
    drawn: str


def check_run(paths: RunPaths, config: Config, *, now_s: float, ended: bool, remedy: Remedy) -> HealthReport:
    """Check one run and write `health/{state.json,report.json,report.html,decisions/}`.

    Args:
        paths: the run's folder.
        config: the run's configuration.
        now_s: wall time (seconds since the epoch).
        ended: the run is over; the report is then always drawn.
        remedy: says what should be done about damage.

    Returns:
        The report that was written.

    Raises:
        DataError: there is no such run, or its log is not a readable file.
        SchemaVersionError: the log was written with another schema version.
    """
    if not paths.root.is_dir():
        raise DataError(f"there is no run folder {paths.root}", remedy="give the folder of a run, e.g. runs/demo-001")
    state_file = paths.health_dir / "state.json"
    saved = _load_state(state_file)
    checker = _restored(saved, config)
    if checker is None:
        saved, checker = None, HealthChecker(config.health, config.train, config.checkpoint)
    cursor = _feed_new(checker, paths.log, start_cursor() if saved is None else saved.cursor)
    report = checker.report(run=paths.root.name, now_s=now_s, ended=ended, remedy=remedy)
    shows = _shown(report)
    fresh = saved is not None and saved.drawn == shows and now_s - saved.drawn_at_s < config.health.report_interval_s
    if saved is not None and fresh and not ended:
        drawn_at_s = saved.drawn_at_s
        write_json(report, paths.health_dir)
    else:
        drawn_at_s = now_s
        write_report(report, checker.history, paths.health_dir)
    if report.decision is not None:
        decision_file = paths.health_dir / "decisions" / f"{report.decision.key}.json"
        if not decision_file.exists():
            write_atomically(decision_file, to_json(report.decision, indent=2).encode())
    if saved is None or cursor != saved.cursor or drawn_at_s != saved.drawn_at_s:
        state = SavedCheck(checker=checker.state(), cursor=cursor, drawn_at_s=drawn_at_s, drawn=shows)
        write_atomically(state_file, msgspec.json.encode(state))
    return report


def checker_of(paths: RunPaths, config: Config) -> HealthChecker:
    """The checker as the last check of a run left it; a fresh one if there was none."""
    checker = _restored(_load_state(paths.health_dir / "state.json"), config)
    return HealthChecker(config.health, config.train, config.checkpoint) if checker is None else checker


def _feed_new(checker: HealthChecker, log: Path, cursor: LogCursor) -> LogCursor:
    while True:
        result = read_new(log, cursor, max_bytes=BLOCK_BYTES)
        checker.feed(result.items)
        cursor = result.cursor
        if not result.more:
            return cursor


def _load_state(file: Path) -> SavedCheck | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=SavedCheck)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("%s is not usable (%s): the log is read from its beginning", file, error)
        return None


def _restored(saved: SavedCheck | None, config: Config) -> HealthChecker | None:
    if saved is None:
        return None
    try:
        return HealthChecker.from_state(saved.checker, config.health, config.train, config.checkpoint)
    except DataError as error:
        logger.warning("%s: the log is read from its beginning", error.what)
        return None


def _shown(report: HealthReport) -> str:
    """What a person would see change at once: the verdict, and how many findings of which weight there are."""
    counts = Counter(f"{finding.detector}/{finding.severity}" for finding in report.findings)
    return f"{report.verdict} {sorted(counts.items())}"
