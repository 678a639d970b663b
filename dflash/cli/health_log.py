"""Judging a log by itself: ours without its run's folder, or somebody else's; nothing is written anywhere.

Invariant: a watched log of ours is read once, however often it is judged. A configuration that lies beside it is used;
without one the thresholds are the defaults, and the learning-rate schedule is not known, so it is not checked.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from dflash.cli.log_sources import CONFIG_NAME, PlacedLog
from dflash.config import CheckpointConfig, Config, HealthConfig, TrainConfig, parse_config
from dflash.errors import ConfigError
from dflash.health import (
    HEAD_BYTES,
    EventLine,
    FieldMap,
    ForeignLog,
    HealthChecker,
    History,
    LogItem,
    Rows,
    blocks_of,
    read_new_from,
    read_rows,
    sniff,
    start_cursor,
)
from dflash.records import Damage, HealthReport, RollbackPlan

logger = logging.getLogger(__name__)

BLOCK_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class JudgedLog:
    """A verdict with the curves behind it, and the share of the steps that a log must hold to be judged."""

    report: HealthReport
    history: History
    min_coverage_frac: float


class LogJudge:
    """Judges one log, now and again as it grows.

    Args:
        source: the log.
        given: fields that a person named, for a log of somebody else.
        name: what the report calls it.
    """

    def __init__(self, source: PlacedLog, *, given: FieldMap, name: str) -> None:
        self._source, self._given, self._name = source, given, name
        self._checker: HealthChecker | None = None
        self._cursor = start_cursor()
        self._schedule_known = False
        self._health = HealthConfig()

    def judge(self, *, now_s: float, ended: bool) -> JudgedLog:
        """Read what is new and judge.

        Args:
            now_s: wall time.
            ended: nobody writes the log any more, so silence is right.

        Raises:
            DataError: it cannot be read, or holds nothing that could be judged.
            SchemaVersionError: it was written by another version of this code.
        """
        if self._checker is None:
            piece = self._source.read_at(0, before=0, max_bytes=HEAD_BYTES)
            kind = sniff(piece.data if piece is not None else b"", origin=self._source.name)
            # A mapping says that the log is not ours, whatever it looks like.
            if kind not in ("own", "empty") or self._given.given:
                return self._judge_foreign(now_s=now_s)
            checker = self._new_checker()
            if kind == "empty":  # whose log it will be is not known yet
                return self._judge_own(checker, now_s=now_s, ended=ended)
            self._checker = checker
        return self._judge_own(self._checker, now_s=now_s, ended=ended)

    def _judge_own(self, checker: HealthChecker, *, now_s: float, ended: bool) -> JudgedLog:
        while True:
            result = read_new_from(self._source, self._cursor, max_bytes=BLOCK_BYTES)
            checker.feed(result.items if self._schedule_known else map(_without_schedule, result.items))
            self._cursor = result.cursor
            if not result.more:
                break
        report = checker.report(run=self._name, now_s=now_s, ended=ended, remedy=_no_remedy)
        if not self._schedule_known:
            note = "not checked: there is no configuration beside the log"
            detectors = tuple(replace(row, note=note) if row.detector == "lr mismatch" else row for row in report.detectors)
            report = replace(report, detectors=detectors)
        return JudgedLog(report, checker.history, self._health.min_coverage_frac)

    def _judge_foreign(self, *, now_s: float) -> JudgedLog:
        origin = self._source.name
        blocks = blocks_of(self._source, block_bytes=BLOCK_BYTES)
        head = next(blocks, b"")
        rows = Rows(format="")
        log = ForeignLog(rows, given=self._given, health=self._health, origin=origin)
        kind = sniff(head[:HEAD_BYTES], origin=origin)
        log.read(read_rows(_again(head, blocks), kind="json lines" if kind == "own" else kind, rows=rows, origin=origin))
        report = log.report(run=self._name, now_s=now_s, recent_records=CheckpointConfig().window_steps)
        return JudgedLog(report, log.history, self._health.min_coverage_frac)

    def _new_checker(self) -> HealthChecker:
        config = self._config_beside()
        self._schedule_known = config is not None
        if config is None:
            return HealthChecker(self._health, TrainConfig(), CheckpointConfig())
        self._health = config.health
        return HealthChecker(config.health, config.train, config.checkpoint)

    def _config_beside(self) -> Config | None:
        text = self._source.beside(CONFIG_NAME)
        if text is None:
            return None
        try:
            return parse_config(text.decode("utf-8"), origin=f"{CONFIG_NAME} beside {self._source.name}")
        except (ConfigError, UnicodeDecodeError) as error:
            logger.warning("the configuration beside %s is not used: %s", self._source.name, error)
            return None


def _without_schedule(item: LogItem) -> LogItem:
    """An event that does not tell how long the schedule is: without the configuration it cannot be compared."""
    if isinstance(item, EventLine) and "total_steps" in item.details:
        return msgspec.structs.replace(item, details={name: value for name, value in item.details.items() if name != "total_steps"})
    return item


def _again(head: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield head
    yield from rest


def _no_remedy(_damage: Damage) -> RollbackPlan | None:
    """A log alone has no checkpoints to go back to."""
    return None
