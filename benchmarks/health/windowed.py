"""Windowed logs: one record every few steps that holds their mean loss, as many trainers write them.

Such a log has no buckets, batches or saves, so it is judged as a plain series, as other people's logs are; nothing can
be rolled back from it, and what is scored as the decision is whether training was called damaged. Delays are in records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.health.labels import Label
from benchmarks.health.runs import Run
from benchmarks.health.score import Score, score_run
from benchmarks.health.watch import Said, Watched
from dflash.config import Config
from dflash.health import HealthChecker
from dflash.health.decision import is_damage
from dflash.health.series import SeriesJudge, SeriesPoint
from dflash.health.step_numbers import StepNumbers
from dflash.records import Finding

EVERY = 8


def points_of(run: Run) -> Iterator[tuple[int, SeriesPoint]]:
    """(last step, mean loss and gradient norm) of every whole window of `EVERY` steps; NaN in a step makes the mean NaN."""
    c = run.columns
    for first in range(0, len(c.step) - EVERY + 1, EVERY):
        rows = slice(first, first + EVERY)
        last = int(c.step[first + EVERY - 1])
        if c.nonfinite[rows].any() or not np.isfinite(c.grad_norm[rows]).all():
            yield last, SeriesPoint(None, None, ("ce", "grad_norm"))
        else:
            loss = float((c.loss[rows] * c.n_tokens[rows]).sum() / c.n_tokens[rows].sum())
            yield last, SeriesPoint(loss, float(c.grad_norm[rows].mean()), ())


def watch_windowed(run: Run, config: Config) -> Watched:
    """What is said of a windowed log of a run, record by record."""
    judge, steps = SeriesJudge(config.health), StepNumbers()
    first_seen: dict[tuple[str, str, int], int] = {}
    for step, point in points_of(run):
        steps.append(step)
        judge.feed(point)
        for finding in judge.findings():
            first_seen.setdefault(_identity(finding), step)
    said = tuple(Said(steps.in_steps(finding), first_seen[_identity(finding)]) for finding in judge.findings())
    nothing = HealthChecker(config.health, config.train, config.checkpoint).report(
        run="windowed", now_s=0.0, ended=True, remedy=lambda _damage: None
    )
    return Watched(said, None, -1, replace(nothing, records=len(steps) * EVERY))


def score_windowed(label: Label | None, watched: Watched) -> Score:
    """The score of a windowed log."""
    score = score_run(label, watched, saves=(), soak_steps=0, interleaved=True)
    damaged = any(is_damage(said.finding) for said in watched.said)
    score.right_decisions = int(damaged == (label is not None and label.rolls_back))
    score.delays = [delay // EVERY for delay in score.delays]
    return score


def _identity(finding: Finding) -> tuple[str, str, int]:
    return finding.detector, finding.severity, finding.first_step
