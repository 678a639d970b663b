"""The check of one run's folder: read what is new, judge, write the report. The only place here that touches files.

Invariant: the run itself is never changed; everything written lies under `health/` and replaces its predecessor
atomically. A damaged or outdated state costs one full reading of the log, never a wrong verdict.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec

from dflash.config import Config
from dflash.errors import DataError
from dflash.health.check import HealthChecker, config_hash, iso_time
from dflash.health.decision import Remedy
from dflash.health.detectors.staleness import NAME as STALE
from dflash.health.files import write_atomically
from dflash.health.reader import LogCursor, is_at_end, read_new, start_cursor
from dflash.health.report import PAGE_NAME, write_json, write_report
from dflash.records import HealthReport, RunPaths, to_json

logger = logging.getLogger(__name__)

LoadedT = TypeVar("LoadedT")
LAST_NAME = "last.json"
BLOCK_BYTES = 256 * 2**10
"""One reading. So few records are still in the processor's cache when they are judged: a tenth faster than 4 MiB at once."""
LINE_BYTES = 4 * 2**20
"""A longer line is skipped: bounds memory, whatever the file holds."""


class SavedCheck(msgspec.Struct):
    """`state.json`: the checker's state (packed), how far the log was read, when the report was drawn and what it showed."""

    checker: bytes
    cursor: LogCursor
    drawn_at_s: float
    drawn: str


class LastCheck(msgspec.Struct, frozen=True):
    """`last.json`: what a check that finds nothing new has to know.

    Attributes:
        config: hash of what was judged by.
        changes: the report changes although the log does not grow: a decision has to be made again, or a clock matters.
        silent_from_s: wall time from which silence itself is a finding; None if it never is.
    """

    config: str
    cursor: LogCursor
    ended: bool
    changes: bool
    silent_from_s: float | None


def check_run(paths: RunPaths, config: Config, *, now_s: float, ended: bool, remedy: Remedy) -> HealthReport:
    """Check one run and write `health/{state.json,last.json,report.json,report.html,decisions/}`.

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
    unchanged = _unchanged(paths, config, now_s=now_s, ended=ended)
    if unchanged is not None:
        return unchanged
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
        state = SavedCheck(checker=checker.packed(), cursor=cursor, drawn_at_s=drawn_at_s, drawn=shows)
        write_atomically(state_file, msgspec.json.encode(state))
    last = LastCheck(
        config=checker.config_hash,
        cursor=cursor,
        ended=ended,
        changes=report.damage is not None or any(finding.detector == STALE for finding in report.findings),
        silent_from_s=checker.silent_from_s(ended=ended),
    )
    if saved is None or _load(paths.health_dir / LAST_NAME, LastCheck) != last:
        write_atomically(paths.health_dir / LAST_NAME, msgspec.json.encode(last))
    return report


def _unchanged(paths: RunPaths, config: Config, *, now_s: float, ended: bool) -> HealthReport | None:
    """The report of the last check, if nothing has come since that could change it: found out without loading the state."""
    last = _load(paths.health_dir / LAST_NAME, LastCheck)
    if last is None or last.changes or last.ended != ended or (last.silent_from_s is not None and now_s > last.silent_from_s):
        return None
    if not is_at_end(paths.log, last.cursor) or not (paths.health_dir / PAGE_NAME).is_file():
        return None
    if last.config != config_hash(config.health, config.train, config.checkpoint):
        return None
    report = _load(paths.health_dir / "report.json", HealthReport)
    return None if report is None else replace(report, run=paths.root.name, checked_at=iso_time(now_s))


def checker_of(paths: RunPaths, config: Config) -> HealthChecker:
    """The checker as the last check of a run left it; where that left nothing usable, one that has read the log anew."""
    checker = _restored(_load_state(paths.health_dir / "state.json"), config)
    if checker is None:
        checker = HealthChecker(config.health, config.train, config.checkpoint)
        _feed_new(checker, paths.log, start_cursor())
    return checker


def _feed_new(checker: HealthChecker, log: Path, cursor: LogCursor) -> LogCursor:
    while True:
        result = read_new(log, cursor, max_bytes=BLOCK_BYTES, max_line_bytes=LINE_BYTES)
        checker.feed(result.items)
        cursor = result.cursor
        if not result.more:
            return cursor


def _load_state(file: Path) -> SavedCheck | None:
    return _load(file, SavedCheck)


def _load(file: Path, kind: type[LoadedT]) -> LoadedT | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        logger.warning("%s is not usable (%s): what it says is worked out anew", file, error)
        return None


def _restored(saved: SavedCheck | None, config: Config) -> HealthChecker | None:
    if saved is None:
        return None
    try:
        return HealthChecker.of_packed(saved.checker, config.health, config.train, config.checkpoint)
    except DataError as error:
        logger.warning("%s: the log is read from its beginning", error.what)
        return None


def _shown(report: HealthReport) -> str:
    """What a person would see change at once: the verdict, and how many findings of which weight there are."""
    counts = Counter(f"{finding.detector}/{finding.severity}" for finding in report.findings)
    return f"{report.verdict} {sorted(counts.items())}"
