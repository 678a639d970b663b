"""A plain loss curve judged by the same detectors: for logs that hold no more than a loss and a gradient norm.

Records are numbered in order, because such logs often record every k-th step: windows and findings are in records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash.config import HealthConfig
from dflash.health.context import RunContext
from dflash.health.detectors import Detector, GradSpike, LossSpike, NonFinite
from dflash.health.lines import MicroBatchLine, StepLine
from dflash.records import Finding
from dflash.records.log import LOG_SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class SeriesPoint:
    """One record; a missing value is None and says nothing, a non-finite one is named."""

    loss: float | None
    grad_norm: float | None
    nonfinite: tuple[str, ...]


def judge_series(points: Sequence[SeriesPoint], *, health: HealthConfig) -> list[Finding]:
    """Findings about a series, in record numbers from 0.

    Args:
        points: records in order, of one bucket.
        health: thresholds.
    """
    context = RunContext()
    detectors: list[Detector] = [NonFinite(health), GradSpike(health.spike), LossSpike(health.spike)]
    for number, point in enumerate(points):
        record = _record(number, point)
        context.see_step(record)
        for detector in detectors:
            detector.on_step(record, context)
    return sorted((f for detector in detectors for f in detector.reported()), key=lambda f: (f.onset_step, f.detector))


def _record(number: int, point: SeriesPoint) -> StepLine:
    return StepLine(
        segment=0,
        step=number,
        wall_time_s=0.0,
        mono_time_s=0.0,
        ce=point.loss,
        accuracy=0.0,
        accepted_length=0.0,
        grad_norm=point.grad_norm,
        clip_coef=None,
        lr=0.0,
        skipped=False,
        nonfinite=point.nonfinite,
        micro_batches=(
            MicroBatchLine(
                batch_id=number, bucket=0, epoch=0, rows=(), n_tokens=1, ce_sum=point.loss, correct=(), valid=()
            ),
        ),
        plan_position=number,
        step_time_s=0.0,
        tokens_per_s=0.0,
        ready_depth=0,
        feature_depth=0,
        target_depths=(),
        schema_version=LOG_SCHEMA_VERSION,
    )
