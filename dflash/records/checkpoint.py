"""Records of the checkpoint room: manifest, trainer state, ledger entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CHECKPOINT_SCHEMA_VERSION = 1

CheckpointState = Literal["writing", "durable", "probation", "clean", "suspect", "bad"]


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Progress: with keyed randomness, two integers and the identities of what they count.

    Attributes:
        step: optimizer updates done.
        plan_position: micro-batches of the plan consumed (skipped ones included).
        segment: number of this stretch of the log; bumped by every resume or rollback.
        skipped_positions: plan positions that are never consumed.
        lr_scale: overlay of the schedule set by a rollback (1 = none).
        nonfinite_in_row: non-finite updates in a row at this point.
        total_steps: optimizer steps the schedule is laid out for.
    """

    step: int
    plan_position: int
    segment: int
    plan_sha256: str
    config_sha256: str
    seed: int
    total_steps: int
    skipped_positions: tuple[int, ...]
    lr_scale: float
    nonfinite_in_row: int
    schema_version: int = CHECKPOINT_SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """Written last into a checkpoint: its presence with matching sizes and hashes means complete."""

    step: int
    segment: int
    plan_position: int
    plan_sha256: str
    data_fingerprint: str
    target_fingerprint: str
    mask_token_id: int
    created_at: str
    finite: bool
    weights_norm: float
    files: tuple[FileEntry, ...]
    schema_version: int = CHECKPOINT_SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One transition of one checkpoint, appended to `ledger.jsonl` by the run's supervisor only."""

    step: int
    segment: int
    state: CheckpointState
    at: str
    reason: str
    schema_version: int = CHECKPOINT_SCHEMA_VERSION
