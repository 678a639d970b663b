"""Records of the checkpoint room: manifest, trainer state, ledger entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

CHECKPOINT_SCHEMA_VERSION = 2

CheckpointState = Literal["writing", "durable", "probation", "clean", "suspect", "bad"]


@dataclass(frozen=True, slots=True)
class LrOverlay:
    """What a rollback changes about the learning rate, on top of the configured schedule.

    Attributes:
        from_step: first step concerned, the state that the rollback returned to.
        rewarm_from: factor at `from_step`.
        rewarm_steps: steps until the factor reaches `cap`; 0 means at once.
        cap: factor from then on.
    """

    from_step: int
    rewarm_from: float
    rewarm_steps: int
    cap: float


@dataclass(frozen=True, slots=True)
class GuardState:
    """What the gradient guard remembers (`train.skip_update_if_grad_over`).

    Attributes:
        norms: newest accepted gradient norms of each kind of step, by its key (a bucket, or `mixed`).
        skipped_in_row: updates that it forbade since the last accepted one.
    """

    norms: Mapping[str, tuple[float, ...]]
    skipped_in_row: int


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Progress: with keyed randomness, two integers and the identities of what they count.

    Attributes:
        step: optimizer updates done.
        plan_position: micro-batches of the plan consumed (skipped ones included).
        segment: number of this stretch of the log; bumped by every resume or rollback.
        skipped_positions: plan positions that are never consumed.
        overlay: change of the learning rate set by a rollback; None for the plain schedule.
        nonfinite_in_row: non-finite updates in a row at this point.
        total_steps: optimizer steps the schedule is laid out for.
        guard: of the gradient guard; None where it is off.
    """

    step: int
    plan_position: int
    segment: int
    plan_sha256: str
    config_sha256: str
    seed: int
    total_steps: int
    skipped_positions: tuple[int, ...]
    overlay: LrOverlay | None
    nonfinite_in_row: int
    guard: GuardState | None = None
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
