"""`python -m dflash health RUN_OR_LOG`: judge a run or any log. Exit 0 healthy, 3 watch, 4 unhealthy, 5 blind."""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path
from typing import Any

from dflash.cli.arguments import add_command, seconds
from dflash.cli.health_any import HealthJudge, HealthOptions, Judged, open_judge
from dflash.cli.output import emit
from dflash.errors import EXIT_BLIND, EXIT_OK, EXIT_UNHEALTHY, EXIT_WATCH, ConfigError
from dflash.health import explain, parse_map, render_html, render_text
from dflash.records import to_dict
from dflash.storage import atomic_write_text

EXIT_CODES = {"healthy": EXIT_OK, "watch": EXIT_WATCH, "unhealthy": EXIT_UNHEALTHY, "blind": EXIT_BLIND}

WATCH_INTERVAL_S = 5.0
"""How often `--watch` looks if nothing else is said."""


def register(groups: Any) -> None:
    """Add the `health` command."""
    parser = add_command(
        groups,
        "health",
        "check a run or any training log; changes nothing in the run unless --act. Exit 0 healthy, 3 watch, 4 unhealthy, 5 blind",
        _health,
    )
    parser.add_argument(
        "log",
        metavar="RUN_OR_LOG",
        help="a run's folder, or a log: a path, s3://bucket/key, ssh://host/path or mlflow:RUN_ID; ours, JSON lines, CSV, "
        "trainer_state.json, metric history or golden values",
    )
    parser.add_argument("--watch", action="store_true", help="go on looking until the run ends; print when something changes")
    parser.add_argument("--interval", type=seconds, default=WATCH_INTERVAL_S, metavar="SECONDS", help="how often --watch looks")
    parser.add_argument("--since-step", type=int, metavar="N", help="leave out what lies wholly before this step")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the page with pictures, one self-contained file")
    parser.add_argument("--explain", metavar="FINDING", help="show one finding in full: its number, or a detector's name")
    parser.add_argument(
        "--map",
        action="append",
        default=[],
        metavar="QUANTITY=FIELD",
        help="fields of somebody else's log, e.g. loss=train/ce,step=global_step; guessed if absent",
    )
    parser.add_argument(
        "--remote-prefix", default="", metavar="WORDS", help="put before the command behind ssh, e.g. 'pct exec 200 --'"
    )
    parser.add_argument("--act", action="store_true", help="hand a decision to the run's supervisor")


def _health(arguments: argparse.Namespace) -> int:
    judge = open_judge(arguments.log, _options(arguments))
    if arguments.watch:
        return _watch(arguments, judge)
    judged = judge.judge()
    _show(arguments, judged)
    return EXIT_CODES[judged.report.verdict]


def _options(arguments: argparse.Namespace) -> HealthOptions:
    try:
        prefix = tuple(shlex.split(arguments.remote_prefix))
    except ValueError as error:
        raise ConfigError(f"--remote-prefix {arguments.remote_prefix!r}: {error}", remedy="close the quotation mark") from error
    return HealthOptions(fields=parse_map(arguments.map), remote_prefix=prefix, since_step=arguments.since_step, act=arguments.act)


def _watch(arguments: argparse.Namespace, judge: HealthJudge) -> int:
    """Judge again and again; a report is printed when its verdict or its findings change."""
    shown: tuple[object, ...] | None = None
    while True:
        judged = judge.judge()
        report = judged.report
        now = (report.verdict, [(finding.detector, finding.severity, finding.first_step) for finding in report.findings])
        if now != shown:
            _show(arguments, judged)
            shown = now
        if judged.over:
            return EXIT_CODES[report.verdict]
        try:
            time.sleep(arguments.interval)
        except KeyboardInterrupt:
            return EXIT_CODES[report.verdict]


def _show(arguments: argparse.Namespace, judged: Judged) -> None:
    report = judged.report
    if arguments.html is not None:
        atomic_write_text(arguments.html, render_html(report, judged.history))
    if arguments.explain is not None:
        found, text = explain(report, arguments.explain)
        emit(arguments, [to_dict(finding) for finding in found], text)
    else:
        emit(arguments, to_dict(report), render_text(report))
