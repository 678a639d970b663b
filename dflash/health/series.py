"""A plain loss curve judged by the same detectors: for logs that hold no more than a loss and a gradient norm.

Records are numbered in order, because such logs often record every k-th step: windows and findings are in records.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash.config import HealthConfig
from dflash.health.context import RunContext
from dflash.health.detectors import Detector, Divergence, GradSpike, LossSpike, NonFinite, SustainedRise
from dflash.health.lines import MicroBatchLine, StepLine
from dflash.records import DetectorSummary, Finding
from dflash.records.log import LOG_SCHEMA_VERSION

_BUCKET = 0


@dataclass(frozen=True, slots=True)
class SeriesPoint:
    """One record; a missing value is None and says nothing, a non-finite one is named."""

    loss: float | None
    grad_norm: float | None
    nonfinite: tuple[str, ...]


class SeriesJudge:
    """Judges one series as its records come.

    Args:
        health: thresholds.
    """

    def __init__(self, health: HealthConfig) -> None:
        self._context = RunContext()
        self._gradient, self._loss = GradSpike(health.spike), LossSpike(health.spike, health.rise)
        self._detectors: list[Detector] = [
            NonFinite(health),
            self._gradient,
            self._loss,
            SustainedRise(health.rise),
            Divergence(health.rise),
        ]
        self._records = 0

    def feed(self, point: SeriesPoint) -> None:
        """Judge the next record."""
        record = _record(self._records, point)
        self._records += 1
        self._context.see_step(record)
        for detector in self._detectors:
            detector.on_step(record, self._context)
        self._context.judged.clear()

    def findings(self) -> list[Finding]:
        """What was found so far, in record numbers from 0."""
        found = (finding for detector in self._detectors for finding in detector.reported())
        return sorted(found, key=lambda finding: (finding.onset_step, finding.detector))

    def summaries(self) -> list[DetectorSummary]:
        """What each detector looked at."""
        return [detector.summary() for detector in self._detectors]

    @property
    def losses_judged(self) -> int:
        """Records whose loss was compared with a baseline."""
        return self._loss.checked

    def loss_band(self) -> tuple[float | None, float | None]:
        """(usual loss, loss where a spike begins) now; None while they are being learnt."""
        return self._loss.usual_and_limit(_BUCKET)

    def gradient_band(self) -> tuple[float | None, float | None]:
        """(usual gradient norm, norm where a spike begins) now; None while they are being learnt."""
        return self._gradient.usual_and_limit(str(_BUCKET))


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
            MicroBatchLine(batch_id=number, bucket=_BUCKET, epoch=0, rows=(), n_tokens=1, ce_sum=point.loss, correct=(), valid=()),
        ),
        plan_position=number,
        step_time_s=0.0,
        tokens_per_s=0.0,
        ready_depth=0,
        feature_depth=0,
        target_depths=(),
        schema_version=LOG_SCHEMA_VERSION,
    )
