"""Data sections of the configuration: sources, on-policy answers, rendering, buckets, batch plan."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from dflash.config.base import Section
from dflash.config.model import TemplateFlags


class AnswerConfig(Section):
    """On-policy answers: the target itself writes the assistant turns."""

    regenerate: bool = Field(True, description="Let the target write every assistant turn.")
    max_new_tokens: int = Field(160, ge=1, description="Longest answer, in tokens.")
    temperature: float = Field(0.0, ge=0, description="0 is greedy; otherwise keyed sampling.")
    batch_size: int = Field(64, ge=1, description="Prompts generated together.")
    keep_unfinished: bool = Field(False, description="Keep answers that hit max_new_tokens without a stop token.")


class DataConfig(Section):
    """From conversations to tokenized, length-bucketed Parquet."""

    source: Literal["synthetic", "files"] = Field("synthetic", description="`synthetic` (seeded generator) or `files`.")
    files: tuple[str, ...] = Field((), description="JSONL files of conversations or prompts, for `source: files`.")
    num_conversations: int | None = Field(None, ge=1, description="How many to take; all if absent (required for synthetic).")
    seed: int = Field(7, ge=0, description="Seed of the synthetic generator.")
    answers: AnswerConfig = Field(AnswerConfig(), description="On-policy answer generation.")
    system_prompt: str | None = Field(None, description="System turn put before conversations that have none.")
    template_flags: TemplateFlags = Field({}, description="Extra chat-template variables, e.g. `enable_thinking: false`.")
    supervise: Literal["all", "last"] = Field("all", description="Which assistant turns carry loss.")
    max_length_tokens: int = Field(256, ge=4, description="Longest rendered sample.")
    over_long: Literal["error", "quarantine", "truncate"] = Field("quarantine", description="What happens to longer samples.")
    bad_rows: Literal["error", "quarantine"] = Field("error", description="What happens to rows that cannot be used.")
    max_bad_frac: float = Field(0.05, ge=0, le=1, description="Quarantined share above which the build stops.")
    bucket_edges_tokens: tuple[int, ...] = Field(
        (48, 72, 104, 144, 192, 256), min_length=1, description="Upper edges of the length buckets, in tokens."
    )
    rows_per_shard: int = Field(50_000, ge=1, description="Rows of one Parquet file.")
    rows_per_group: int = Field(256, ge=1, description="Rows of one Parquet row group (unit of random access).")

    @model_validator(mode="after")
    def _edges_and_sources_fit(self) -> Self:
        edges = self.bucket_edges_tokens
        if list(edges) != sorted(set(edges)) or edges[0] < 2:
            raise ValueError(f"bucket_edges_tokens {list(edges)} must be strictly increasing and at least 2")
        if edges[-1] < self.max_length_tokens:
            raise ValueError(f"the last bucket edge {edges[-1]} is below max_length_tokens {self.max_length_tokens}")
        if self.source == "files" and not self.files:
            raise ValueError("source is `files` but files is empty")
        if self.source == "synthetic" and self.num_conversations is None:
            raise ValueError("source is `synthetic`: set num_conversations")
        return self


class PlanConfig(Section):
    """How samples become batches."""

    tokens_per_batch: int = Field(1024, ge=1, description="Padded tokens a micro-batch holds at most.")
    max_sequences: int = Field(64, ge=1, description="Sequences a micro-batch holds at most.")
    pad_multiple_tokens: int = Field(8, ge=1, description="Padded lengths are multiples of this (few distinct shapes).")
    max_bucket_run: int = Field(3, ge=1, description="Longest run of one bucket in consumption order, where feasible.")
