"""One door for the command line: whatever is named, a run's folder or a log anywhere, becomes something to judge."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dflash.cli.health_log import LogJudge
from dflash.cli.log_sources import LOG_NAME, LocalPlace, source_of
from dflash.config import CheckpointConfig, HealthConfig, load_config
from dflash.errors import DataError, RunStateError, TrackingError
from dflash.health import FieldMap, ForeignLog, History, Rows, checker_of, history_rows, narrowed
from dflash.records import HealthReport, RunPaths
from dflash.tracking import read_history

MLFLOW_SCHEME = "mlflow:"


@dataclass(frozen=True, slots=True)
class HealthOptions:
    """What a person asked for.

    Attributes:
        fields: of somebody else's log.
        remote_prefix: words before the command behind ssh.
        since_step: what lies wholly before it is left out.
        act: hand a decision to the run's supervisor.
    """

    fields: FieldMap
    remote_prefix: tuple[str, ...]
    since_step: int | None
    act: bool


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict, the curves behind it, and whether looking again can change anything."""

    report: HealthReport
    history: History
    over: bool


class HealthJudge(Protocol):
    """Something that can be judged again as it grows."""

    def judge(self) -> Judged:
        """Read what is new and judge."""


def open_judge(address: str, options: HealthOptions) -> HealthJudge:
    """What an address names, ready to be judged.

    Raises:
        DataError: there is nothing to judge under that address.
        RunStateError: something was asked for that only a run can do.
        StorageError: the address is malformed, or its machine or store does not answer.
    """
    path = Path(address)
    if RunPaths(path).config.is_file():
        if options.fields.given:
            raise DataError(f"{address} is a run of this pipeline", remedy=f"leave out --map, or name a log inside it: {LOG_NAME}")
        return _Run(path, options)
    if options.act:
        raise RunStateError(f"--act needs a run's folder, {address} is none", remedy="give the folder that holds config.yaml")
    if address.startswith(MLFLOW_SCHEME):
        return _Tracked(address.removeprefix(MLFLOW_SCHEME).lstrip("/"), options)
    return _Log(address, options)


class _Run:
    """A run of this pipeline, judged as its supervisor judges it."""

    def __init__(self, path: Path, options: HealthOptions) -> None:
        from dflash.stages import health_stage  # these import torch, which no log alone needs
        from dflash.train.runs import run_is_live

        self._paths, self._options = RunPaths(path), options
        self._config = load_config(self._paths.config)
        self._check, self._is_live = health_stage, run_is_live

    def judge(self) -> Judged:
        """See `HealthJudge`."""
        live = self._is_live(self._paths)
        report = self._check(self._paths.root, act=self._options.act, ended=None)
        checker = checker_of(self._paths, self._config)
        return Judged(_since(report, self._options, self._config.health.min_coverage_frac), checker.history, over=not live)


class _Tracked:
    """A run of an MLflow store."""

    def __init__(self, run_id: str, options: HealthOptions) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            raise TrackingError(
                f"where is the store of run {run_id}?", remedy="set MLFLOW_TRACKING_URI, e.g. sqlite:///runs/mlflow.db"
            )
        self._uri, self._run_id, self._options = uri, run_id, options

    def judge(self) -> Judged:
        """See `HealthJudge`."""
        points = read_history(self._uri, self._run_id)
        entries = ({"key": p.name, "value": p.value, "step": p.step, "timestamp": p.timestamp_ms} for p in points)
        rows = Rows(format="metrics of an MLflow run")
        log = ForeignLog(rows, given=self._options.fields, health=HealthConfig(), origin=f"run {self._run_id}")
        log.read(history_rows(entries))
        report = log.report(run=f"mlflow:{self._run_id}", now_s=time.time(), recent_records=CheckpointConfig().window_steps)
        return Judged(_since(report, self._options, HealthConfig().min_coverage_frac), log.history, over=False)


class _Log:
    """A log alone."""

    def __init__(self, address: str, options: HealthOptions) -> None:
        source = source_of(address, remote_prefix=options.remote_prefix)
        local = isinstance(source, LocalPlace)
        self._name = Path(source.name).name if local else source.name
        if local and self._name == LOG_NAME:
            self._name = f"{Path(source.name).resolve().parent.name}/{LOG_NAME}"
        self._judge = LogJudge(source, given=options.fields, name=self._name)
        self._options = options

    def judge(self) -> Judged:
        """See `HealthJudge`."""
        # Whether somebody still writes it cannot be known from outside, so silence is no finding.
        judged = self._judge.judge(now_s=time.time(), ended=True)
        finished = bool(judged.report.stats.get("finished"))
        return Judged(_since(judged.report, self._options, judged.min_coverage_frac), judged.history, over=finished)


def _since(report: HealthReport, options: HealthOptions, min_coverage_frac: float) -> HealthReport:
    if options.since_step is None:
        return report
    return narrowed(report, since_step=options.since_step, min_coverage_frac=min_coverage_frac)
