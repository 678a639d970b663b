"""The detectors: one file each, pure functions of (records, state)."""

from __future__ import annotations

from dflash.health.detectors.base import Detector
from dflash.health.detectors.grad_spike import GradSpike
from dflash.health.detectors.integrity import Integrity
from dflash.health.detectors.loss_spike import LossSpike
from dflash.health.detectors.nonfinite import NonFinite
from dflash.health.detectors.queues import QueueDecline
from dflash.health.detectors.run_length import RunLength
from dflash.health.detectors.saves import SaveFailure
from dflash.health.detectors.schedule import Schedule

__all__ = [
    "Detector",
    "GradSpike",
    "Integrity",
    "LossSpike",
    "NonFinite",
    "QueueDecline",
    "RunLength",
    "SaveFailure",
    "Schedule",
]
