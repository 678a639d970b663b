"""Records of the data room: conversations, the data set's manifest, the batch plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

DATA_SCHEMA_VERSION = 1
PLAN_SCHEMA_VERSION = 1

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation; the last turn may be a user turn that the target still has to answer.

    Attributes:
        id: unique inside its data set.
        messages: turns in order.
        origin: where it came from (`file:line`, or the generator's name), for errors and quarantine.
        kind: free label used for slices (task kind, source name).
    """

    id: str
    messages: tuple[Message, ...]
    origin: str
    kind: str


@dataclass(frozen=True, slots=True)
class QuarantinedRow:
    """A row that could not be used, and why."""

    origin: str
    reason: str


@dataclass(frozen=True, slots=True)
class BucketStats:
    """What one length bucket holds."""

    bucket: int
    upper_edge_tokens: int
    samples: int
    tokens: int
    supervised_tokens: int


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One Parquet file of a data set, relative to the manifest's folder."""

    path: str
    bucket: int
    rows: int
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class DataManifest:
    """Provenance and content of a length-bucketed data set; written last, so its presence means complete.

    Attributes:
        fingerprint: SHA-256 over everything that determines the content (config, target, template, sources).
        target_fingerprint: SHA-256 over the target's configuration and weights that wrote the answers.
        template_sha256: hash of the chat template text.
        template_flags: extra chat-template variables (thinking mode and the like); enforced at evaluation.
        mask_token_id: the drafter's mask token; proven absent from every sample.
        prompt_hashes_sha256: SHA-256 over the sorted normalised prompt hashes in `prompt_hashes.txt`.
        shards: in order; a sample's global row number counts through them.
    """

    fingerprint: str
    created_at: str
    source: Mapping[str, Any]
    target_path: str
    target_fingerprint: str
    tokenizer_sha256: str
    template_sha256: str
    template_flags: Mapping[str, Any]
    vocab_size: int
    mask_token_id: int
    on_policy: bool
    answer_sampling: Mapping[str, Any]
    samples: int
    tokens: int
    supervised_tokens: int
    max_length_tokens: int
    quarantined: Mapping[str, int]
    prompt_hashes_sha256: str
    buckets: tuple[BucketStats, ...]
    shards: tuple[ShardEntry, ...]
    schema_version: int = DATA_SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """One micro-batch of the plan.

    Attributes:
        position: index in consumption order, counted through all epochs; also its batch id.
        epoch: 0-based.
        bucket: bucket that all its samples belong to.
        padded_length_tokens: padded length, stored so that a run is reproducible.
        rows: global row numbers of its samples (sample ids of the data set).
    """

    position: int
    epoch: int
    bucket: int
    padded_length_tokens: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlanManifest:
    """A batch plan's identity and quality; `plan.parquet` beside it holds the batches.

    Attributes:
        plan_sha256: SHA-256 over the batches themselves, independent of the file format.
        settings: the `plan` section that it was made with.
        samples: samples of one epoch.
        tokens, padded_tokens: over all epochs; their ratio is the padding efficiency.
        bucket_run_feasible: whether `settings.max_bucket_run` can be kept at all with this mix of buckets.
    """

    plan_sha256: str
    settings: Mapping[str, Any]
    data_fingerprint: str
    seed: int
    epochs: int
    batches: int
    batches_per_epoch: tuple[int, ...]
    samples: int
    tokens: int
    padded_tokens: int
    padding_efficiency: float
    longest_bucket_run: int
    bucket_run_feasible: bool
    schema_version: int = PLAN_SCHEMA_VERSION
