"""The detectors: one question each, pure functions of (records, state)."""

from __future__ import annotations

from dflash.health.detectors.accuracy import AccuracyDrop
from dflash.health.detectors.artefact import ShortWindow
from dflash.health.detectors.base import Detector
from dflash.health.detectors.dead_metric import DeadMetric
from dflash.health.detectors.divergence import Divergence
from dflash.health.detectors.explosion import GradientExplosion
from dflash.health.detectors.grad_spike import GradSpike
from dflash.health.detectors.integrity import Integrity
from dflash.health.detectors.loss_spike import LossSpike
from dflash.health.detectors.nonfinite import NonFinite
from dflash.health.detectors.queues import QueueDecline
from dflash.health.detectors.replay import BadResume, RepeatedData
from dflash.health.detectors.run_length import RunLength
from dflash.health.detectors.saves import SaveCorrelation, SaveFailure, SaveStall
from dflash.health.detectors.schedule import Schedule
from dflash.health.detectors.shares import BucketMix, ShareDrift
from dflash.health.detectors.simple_rules import SimpleRules
from dflash.health.detectors.speed import TargetBalance, Throughput
from dflash.health.detectors.sustained import SustainedRise

__all__ = [
    "AccuracyDrop",
    "BadResume",
    "BucketMix",
    "DeadMetric",
    "Detector",
    "Divergence",
    "GradSpike",
    "GradientExplosion",
    "Integrity",
    "LossSpike",
    "NonFinite",
    "QueueDecline",
    "RepeatedData",
    "RunLength",
    "SaveCorrelation",
    "SaveFailure",
    "SaveStall",
    "Schedule",
    "ShareDrift",
    "ShortWindow",
    "SimpleRules",
    "SustainedRise",
    "TargetBalance",
    "Throughput",
]
