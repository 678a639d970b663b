"""Frozen, versioned records that cross the borders between rooms (and between processes, as files)."""

from dflash.records.checkpoint import (
    CheckpointManifest,
    CheckpointState,
    FileEntry,
    GuardState,
    LedgerEntry,
    LrOverlay,
    TrainerState,
)
from dflash.records.checks import CheckResult, CheckStatus
from dflash.records.codec import from_dict, from_json, to_dict, to_json
from dflash.records.data import (
    BucketStats,
    Conversation,
    DataFile,
    DataManifest,
    Message,
    PlanArray,
    PlanManifest,
    PlannedBatch,
    QuarantinedRow,
    Role,
    ShardEntry,
    SourceEntry,
    UnitRecord,
)
from dflash.records.drill import FaultName, FaultPlan, PlantedFault
from dflash.records.health import (
    ControlRequest,
    DetectorSummary,
    Domain,
    Finding,
    HealthReport,
    Severity,
    Verdict,
)
from dflash.records.layout import RunPaths
from dflash.records.log import SEGMENT_STARTS, EventName, EventRecord, MicroBatchRecord, StepRecord
from dflash.records.probe import ProbeFigures, ProbeOutcome, ProbeRecord
from dflash.records.registry import RegisteredDrafter, RegisteredEvidence, Ruling
from dflash.records.result import EvaluationResult, PromptSetEntry, RunSummary
from dflash.records.rollback import Damage, LedgerLine, RollbackEntry, RollbackPlan, SavedState, SkipRange
from dflash.records.seal import from_sealed_json, sealed, to_sealed_json, unsealed
from dflash.records.sweep import RivalRow, RivalTable, SweepCell, SweepResult

__all__ = [
    "SEGMENT_STARTS",
    "BucketStats",
    "CheckResult",
    "CheckStatus",
    "CheckpointManifest",
    "CheckpointState",
    "ControlRequest",
    "Conversation",
    "Damage",
    "DataFile",
    "DataManifest",
    "DetectorSummary",
    "Domain",
    "EvaluationResult",
    "EventName",
    "EventRecord",
    "FaultName",
    "FaultPlan",
    "FileEntry",
    "Finding",
    "GuardState",
    "HealthReport",
    "LedgerEntry",
    "LedgerLine",
    "LrOverlay",
    "Message",
    "MicroBatchRecord",
    "PlanArray",
    "PlanManifest",
    "PlannedBatch",
    "ProbeFigures",
    "ProbeOutcome",
    "ProbeRecord",
    "PlantedFault",
    "PromptSetEntry",
    "QuarantinedRow",
    "Role",
    "RegisteredDrafter",
    "RegisteredEvidence",
    "RivalRow",
    "RivalTable",
    "RollbackEntry",
    "RollbackPlan",
    "RunPaths",
    "Ruling",
    "RunSummary",
    "SavedState",
    "Severity",
    "ShardEntry",
    "SkipRange",
    "SourceEntry",
    "StepRecord",
    "SweepCell",
    "SweepResult",
    "TrainerState",
    "UnitRecord",
    "Verdict",
    "from_dict",
    "from_json",
    "from_sealed_json",
    "sealed",
    "to_dict",
    "to_json",
    "to_sealed_json",
    "unsealed",
]
