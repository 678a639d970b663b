"""Frozen, versioned records that cross the borders between rooms (and between processes, as files)."""

from dflash.records.checkpoint import CheckpointManifest, CheckpointState, FileEntry, LedgerEntry, TrainerState
from dflash.records.codec import from_dict, from_json, to_dict, to_json
from dflash.records.data import (
    BucketStats,
    Conversation,
    DataManifest,
    Message,
    PlanManifest,
    PlannedBatch,
    QuarantinedRow,
    Role,
    ShardEntry,
)
from dflash.records.health import (
    ControlRequest,
    Decision,
    DetectorSummary,
    Domain,
    Finding,
    HealthReport,
    Severity,
    Verdict,
)
from dflash.records.layout import RunPaths
from dflash.records.log import EventName, EventRecord, MicroBatchRecord, StepRecord
from dflash.records.result import EvaluationResult, RunSummary

__all__ = [
    "BucketStats",
    "CheckpointManifest",
    "CheckpointState",
    "ControlRequest",
    "Conversation",
    "DataManifest",
    "Decision",
    "DetectorSummary",
    "Domain",
    "EvaluationResult",
    "EventName",
    "EventRecord",
    "FileEntry",
    "Finding",
    "HealthReport",
    "LedgerEntry",
    "Message",
    "MicroBatchRecord",
    "PlanManifest",
    "PlannedBatch",
    "QuarantinedRow",
    "Role",
    "RunPaths",
    "RunSummary",
    "Severity",
    "ShardEntry",
    "StepRecord",
    "TrainerState",
    "Verdict",
    "from_dict",
    "from_json",
    "to_dict",
    "to_json",
]
