"""Data sections of the configuration: sources, on-policy answers, rendering, buckets, reader, batch plan."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from dflash.config.base import Section
from dflash.config.model import TemplateFlags


class ServerConfig(Section):
    """An OpenAI-compatible server (vLLM, SGLang) that serves the target."""

    url: str | None = Field(None, description="Base address with the version, e.g. `http://127.0.0.1:8000/v1`.")
    model: str | None = Field(None, description="Name of the target at the server; the target's own path if absent.")
    api_key_env: str = Field("OPENAI_API_KEY", description="Environment variable that holds the key, if one is needed.")
    concurrency: int = Field(64, ge=1, description="Requests in flight at once.")
    request_timeout_s: float = Field(600.0, gt=0, description="Longest wait for one answer.")
    max_retries: int = Field(6, ge=0, description="Tries after the first for one request.")
    backoff_s: float = Field(1.0, gt=0, description="Wait before the first retry; it doubles each time, with jitter.")
    compare_greedy: bool = Field(
        False, description="Load the target here too, and compare a few greedy answers with the server's before anything is asked."
    )


class AnswerConfig(Section):
    """On-policy answers: the target itself writes the assistant turns."""

    regenerate: bool = Field(True, description="Let the target write every assistant turn.")
    engine: Literal["in_process", "server"] = Field("in_process", description="Who runs the target for it.")
    server: ServerConfig = Field(ServerConfig(), description="The server, for `engine: server`.")
    max_new_tokens: int = Field(160, ge=1, description="Longest answer, in tokens.")
    temperature: float = Field(0.0, ge=0, description="0 is greedy; otherwise keyed sampling.")
    batch_size: int = Field(64, ge=1, description="Prompts generated together in process.")
    keep_unfinished: bool = Field(False, description="Keep answers that hit max_new_tokens without a stop token.")

    @model_validator(mode="after")
    def _server_has_address(self) -> Self:
        if self.regenerate and self.engine == "server" and self.server.url is None:
            raise ValueError("engine is `server`: set server.url, e.g. http://127.0.0.1:8000/v1")
        return self


class ReaderConfig(Section):
    """How a training process reads the data set."""

    cache_mib: int = Field(256, ge=1, description="Decoded pages and page indexes kept in memory.")
    prefetch_batches: int = Field(8, ge=0, description="Batches read ahead.")
    threads: int = Field(2, ge=1, description="Threads that read ahead.")
    verify: Literal["sizes", "sampled", "full"] = Field(
        "sampled", description="Bytes checked against the manifest when a data set is opened."
    )


class DataConfig(Section):
    """From conversations to tokenized, length-bucketed Parquet."""

    source: Literal["synthetic", "files"] = Field("synthetic", description="`synthetic` (seeded generator) or `files`.")
    files: tuple[str, ...] = Field(
        (), description="JSONL, JSON or Parquet (plain, gzip, zstd), local or `s3://`, globs allowed, for `source: files`."
    )
    num_conversations: int | None = Field(None, ge=1, description="How many to take; all if absent (required for synthetic).")
    seed: int = Field(7, ge=0, description="Seed of the synthetic generator.")
    store: str | None = Field(
        None, description="Where data sets are kept: folder or `s3://bucket/prefix`; `<run.root>/data` if absent."
    )
    runner: Literal["local", "dask", "ray"] = Field("local", description="What spreads the input files over workers.")
    runner_address: str | None = Field(None, description="Scheduler of an existing Dask or Ray cluster; a local one if absent.")
    workers: int = Field(1, ge=1, description="Tokenizing processes on this machine, or workers of the local cluster.")
    answers: AnswerConfig = Field(AnswerConfig(), description="On-policy answer generation.")
    system_prompt: str | None = Field(None, description="System turn put before conversations that have none.")
    template_flags: TemplateFlags = Field({}, description="Extra chat-template variables, e.g. `enable_thinking: false`.")
    supervise: Literal["all", "last"] = Field("all", description="Which assistant turns carry loss.")
    supervise_reasoning: bool = Field(True, description="Whether the reasoning part of an answer carries loss.")
    max_length_tokens: int = Field(256, ge=4, description="Longest rendered sample.")
    over_long: Literal["error", "drop", "truncate", "split"] = Field("drop", description="What happens to longer samples.")
    bad_rows: Literal["error", "quarantine"] = Field("error", description="What happens to rows that cannot be used.")
    max_bad_frac: float = Field(0.05, ge=0, le=1, description="Quarantined share above which the build stops.")
    bucket_edges_tokens: tuple[int, ...] | Literal["auto", "equal_mass"] = Field(
        (48, 72, 104, 144, 192, 256),
        description="Upper edges of the length buckets; `auto` pads the measured lengths least, `equal_mass` shares tokens evenly.",
    )
    num_buckets: int = Field(6, ge=1, le=64, description="Buckets of `auto` and `equal_mass`.")
    rows_per_shard: int = Field(50_000, ge=1, description="Rows of one Parquet file.")
    rows_per_group: int = Field(
        2048,
        ge=1,
        description="Rows of one Parquet row group, held in memory until written; random access goes by pages, not by these.",
    )
    reader: ReaderConfig = Field(ReaderConfig(), description="Reading while training.")

    @property
    def longest_sample_tokens(self) -> int:
        """No sample is longer than this: the last given edge, or the length limit where edges are computed."""
        edges = self.bucket_edges_tokens
        return edges[-1] if isinstance(edges, tuple) else self.max_length_tokens

    @model_validator(mode="after")
    def _edges_and_sources_fit(self) -> Self:
        edges = self.bucket_edges_tokens
        if isinstance(edges, tuple):
            if not edges or list(edges) != sorted(set(edges)) or edges[0] < 2:
                raise ValueError(f"bucket_edges_tokens {list(edges)} must be strictly increasing and at least 2")
            if edges[-1] < self.max_length_tokens:
                raise ValueError(f"the last bucket edge {edges[-1]} is below max_length_tokens {self.max_length_tokens}")
        if self.source == "files" and not self.files:
            raise ValueError("source is `files` but files is empty")
        if self.runner != "local" and self.answers.regenerate and self.answers.engine == "in_process":
            raise ValueError(
                f"runner is `{self.runner}` and every worker would load the target to write answers: "
                "set answers.engine: server, answers.regenerate: false, or runner: local"
            )
        if self.source == "synthetic" and self.num_conversations is None:
            raise ValueError("source is `synthetic`: set num_conversations")
        return self


class PlanConfig(Section):
    """How samples become batches, and in which order they come."""

    tokens_per_batch: int = Field(1024, ge=1, description="Padded tokens a micro-batch holds at most.")
    max_sequences: int = Field(64, ge=1, description="Sequences a micro-batch holds at most.")
    pad_multiple_tokens: int = Field(8, ge=1, description="Padded lengths are multiples of this (few distinct shapes).")
    max_padded_lengths: int | None = Field(
        None, ge=1, description="Distinct padded lengths at most, for attention compiled once a shape (32 is a good ladder)."
    )
    sort_window_samples: int | None = Field(
        None, ge=1, description="Samples sorted by length together inside a bucket; the whole bucket if absent (least padding)."
    )
    order: Literal["interleave", "shuffle", "sorted", "random"] = Field(
        "interleave",
        description="`interleave` mixes buckets evenly, `shuffle` permutes batches, `sorted` goes by length, `random` ignores it.",
    )
    equal_cost_neighbours: int = Field(
        1,
        ge=1,
        description="Batches of nearly equal cost side by side: `cluster.replicas` spares replicas their waiting for each other, "
        "at the price of steps with fewer lengths, and of no limit of runs; 1 keeps the mixture.",
    )
    max_bucket_run: int = Field(3, ge=1, description="Longest run of one bucket in consumption order, where feasible.")
