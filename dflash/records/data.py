"""Records of the data room: conversations, the data set's manifest, the batch plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

DATA_SCHEMA_VERSION = 3
PLAN_SCHEMA_VERSION = 2

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Attributes:
        reasoning: the assistant's thoughts before its answer, where the source keeps them apart.
        tool_calls: calls that the assistant makes, as the chat template wants them.
        name: of the tool that answers, where the source has it.
    """

    role: Role
    content: str
    reasoning: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation; the last turn may be a user turn that the target still has to answer.

    Attributes:
        id: unique inside its source (see `dflash.data.seen_ids`).
        messages: turns in order.
        origin: where it came from (`file:line`, or the generator's name), for errors and quarantine.
        kind: free label used for slices (task kind, source name).
        tools: JSON schemas of the tools that the chat template is given.
        text: plain text without turns; `messages` is empty then, and every token is supervised.
    """

    id: str
    messages: tuple[Message, ...]
    origin: str
    kind: str
    tools: tuple[Mapping[str, Any], ...] = ()
    text: str | None = None


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
    """One Parquet file of a data set; `path` is its name in the data set's store."""

    path: str
    bucket: int
    rows: int
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class DataFile:
    """Another file of a data set; `path` is its name in the data set's store, `rows` what it lists."""

    path: str
    rows: int
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """One source of a data set and what became of it.

    Attributes:
        label: the file's name without its folder (`~2` behind it for the second file of that name), or the generator's name;
            unique inside the data set, so that it qualifies the ids of the source's rows.
        sha256: of the file's bytes, or of the generator's conversations.
        size_bytes: of the file; 0 for a generator.
        unit: id (SHA-256) of the unit that was built from it.
        rows: conversations and bad rows that were read.
        samples: samples made from them.
    """

    label: str
    sha256: str
    size_bytes: int
    unit: str
    rows: int
    samples: int


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """One source, built: written after all of the unit's files, so its presence means they are complete.

    Attributes:
        recipe_fingerprint: of everything but the source that determines the samples.
        edges_tokens: upper edges of the buckets.
        quarantined: rows, and parts of rows (`part_...`), that were set aside, by reason code.
        dropped_tokens: tokens of rows that were kept which are in no sample.
        answers: answers that the target wrote for kept conversations; `exact_answers`: those that rendering gives unchanged.
        prompts: sorted unique prompt hashes (16 bytes each); `quarantine`: the rows set aside, one JSON object a line.
        shards: bucket by bucket, in order.
    """

    recipe_fingerprint: str
    source: SourceEntry
    edges_tokens: tuple[int, ...]
    buckets: tuple[BucketStats, ...]
    quarantined: Mapping[str, int]
    dropped_tokens: int
    answers: int
    exact_answers: int
    prompts: DataFile
    quarantine: DataFile
    shards: tuple[ShardEntry, ...]
    schema_version: int = DATA_SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class DataManifest:
    """Provenance and content of a length-bucketed data set; written last, so its presence means complete.

    It holds neither time nor place: the same input gives the same bytes wherever and however it is built.

    Attributes:
        fingerprint: SHA-256 over the recipe, the bucket edges and the units: everything that determines the content.
        recipe_fingerprint: SHA-256 over what determines the samples of any source (config, target, template).
        sources: in the configured order.
        target_id: the target's hub name, or the name of its folder.
        target_fingerprint: SHA-256 over the target's configuration and weights that wrote the answers.
        template_sha256: hash of the chat template text.
        template_flags: extra chat-template variables (thinking mode and the like); enforced at evaluation.
        mask_token_id: the drafter's mask token; `mask_token_uses`: how often a sample uses it, proven to be 0.
        rows: conversations and bad rows that were read.
        edges_tokens: upper edges of the length buckets.
        quarantined: rows, and parts of rows (`part_...`), that were set aside, by reason code; listed in `quarantine_files`.
        dropped_tokens: tokens of rows that were kept which are in no sample: cut off at the length limit, or in such a part.
        prompt_files: hashes of all user turns that samples were made from.
        shards: in order (source by source, bucket by bucket); a sample's global row number counts through them.
    """

    fingerprint: str
    recipe_fingerprint: str
    sources: tuple[SourceEntry, ...]
    target_id: str
    target_fingerprint: str
    tokenizer_sha256: str
    template_sha256: str
    template_flags: Mapping[str, Any]
    vocab_size: int
    mask_token_id: int
    mask_token_uses: int
    on_policy: bool
    answer_sampling: Mapping[str, Any]
    rows: int
    samples: int
    tokens: int
    supervised_tokens: int
    max_length_tokens: int
    edges_tokens: tuple[int, ...]
    quarantined: Mapping[str, int]
    dropped_tokens: int
    buckets: tuple[BucketStats, ...]
    prompt_files: tuple[DataFile, ...]
    quarantine_files: tuple[DataFile, ...]
    shards: tuple[ShardEntry, ...]
    schema_version: int = DATA_SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """One micro-batch of the plan.

    Attributes:
        position: index in consumption order, counted through all epochs; also its batch id.
        epoch: 0-based.
        bucket: bucket that all its samples belong to (of its longest sample in a plan of the order `random`).
        padded_length_tokens: padded length, stored so that a run is reproducible.
        rows: global row numbers of its samples (sample ids of the data set).
    """

    position: int
    epoch: int
    bucket: int
    padded_length_tokens: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlanArray:
    """One array of one epoch of a plan, a one-dimensional `.npy` file beside the manifest.

    Attributes:
        sha256: over the values as little-endian bytes, without the file's header.
    """

    path: str
    epoch: int
    name: str
    dtype: str
    length: int
    sha256: str


@dataclass(frozen=True, slots=True)
class PlanManifest:
    """A batch plan's identity and quality; the arrays beside it hold the batches. Written last.

    Attributes:
        plan_sha256: SHA-256 over the hashes of all arrays, independent of the file format.
        settings: the `plan` section that it was made with.
        samples: samples of one epoch.
        tokens, padded_tokens: over all epochs; their ratio is the padding efficiency.
        padded_lengths_tokens: every padded length that a batch may have.
        longest_bucket_run: found in the whole plan, joins of epochs included.
        bucket_run_feasible: whether `settings.max_bucket_run` can be kept at all with this mix of buckets.
        bucket_run_limit: the run that the order was made to keep; 0 if the order keeps none.
        bucket_run_note: what is feasible, and why.
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
    padded_lengths_tokens: tuple[int, ...]
    longest_bucket_run: int
    bucket_run_feasible: bool
    bucket_run_limit: int
    bucket_run_note: str
    arrays: tuple[PlanArray, ...]
    schema_version: int = PLAN_SCHEMA_VERSION
