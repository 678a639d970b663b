"""A complete tiny run folder (random Qwen3 target, random samples, plan, config) that trains in a few seconds on a CPU.

`build_tiny_run(root, overrides=...)` makes everything that `supervise` needs; `tiny_target` and `tiny_data_set` are
usable on their own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash.config import Config, dump_config, parse_config
from dflash.data.buckets import bucket_of
from dflash.data.columns import TokenizedSample
from dflash.data.plan import prepare_plan
from dflash.data.reader import SampleStore
from dflash.model.target import read_target_info
from dflash.records import DataManifest, RunPaths
from dflash.storage import open_store
from dflash.train.runs import prepare_run
from tests.support.data_sets import write_samples

VOCAB_SIZE = 48
MASK_TOKEN_ID = 47
"""No sample contains it."""

TINY_CONFIG = """
run: {{name: tiny, root: {root}, seed: 5}}
target: {{path: {target}, mask_token_id: 47}}
drafter:
  hidden_size: 16
  intermediate_size: 24
  num_attention_heads: 2
  num_key_value_heads: 1
  head_dim: 8
  block_size: 4
  target_layer_ids: [0, 1]
  max_position_embeddings: 64
data:
  source: synthetic
  num_conversations: {samples}
  answers: {{regenerate: false}}
  max_length_tokens: 32
  bucket_edges_tokens: [12, 20, 32]
plan: {{tokens_per_batch: 64, max_sequences: 4, pad_multiple_tokens: 4}}
train: {{epochs: 2, lr: 0.01, warmup_frac: 0.2, heartbeat_s: 0.2, restart_wait_s: 0}}
checkpoint: {{interval_steps: 4, window_steps: 4, soak_steps: 4}}
tracking: {{enabled: false}}
"""


@dataclass(frozen=True, slots=True)
class TinyRun:
    """A prepared run."""

    config: Config
    paths: RunPaths
    data_dir: Path


def tiny_model(*, seed: int, hidden_size: int, num_hidden_layers: int, tie_word_embeddings: bool) -> Qwen3ForCausalLM:
    """A random Qwen3 causal LM of 48 tokens."""
    torch.manual_seed(seed)
    shape = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=tie_word_embeddings,
        initializer_range=0.2,
        eos_token_id=0,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(shape).float()


def tiny_target(directory: Path, *, seed: int = 0, hidden_size: int = 16, num_hidden_layers: int = 3) -> Path:
    """Save a random model as a Hugging Face folder; returns the folder."""
    model = tiny_model(seed=seed, hidden_size=hidden_size, num_hidden_layers=num_hidden_layers, tie_word_embeddings=True)
    model.save_pretrained(directory, safe_serialization=True)
    return directory


def tiny_samples(config: Config, *, samples: int, tokens: int, seed: int) -> list[list[TokenizedSample]]:
    """Random samples of ids below `tokens`, by bucket; each is a prompt and a supervised answer."""
    generator = np.random.default_rng(seed)
    edges = config.data.bucket_edges_tokens
    assert not isinstance(edges, str)
    buckets: list[list[TokenizedSample]] = [[] for _ in edges]
    for number in range(samples):
        length = int(generator.integers(6, edges[-1] + 1))
        prompt = int(generator.integers(1, length - 3))
        # A walk instead of noise, so that there is something to learn.
        ids = np.cumsum(generator.integers(1, 3, length)) % tokens
        sample = TokenizedSample(f"s{number}", "walk", ids.astype(np.int32), ((prompt, length),), turns=2)
        buckets[bucket_of(length, edges)].append(sample)
    return buckets


def write_tiny_data_set(directory: Path, config: Config, buckets: Sequence[Sequence[TokenizedSample]]) -> DataManifest:
    """Write a data set of these samples for the configured target."""
    edges = config.data.bucket_edges_tokens
    assert not isinstance(edges, str)
    return write_samples(
        open_store(directory),
        buckets,
        edges=edges,
        rows_per_shard=64,
        rows_per_group=8,
        target_fingerprint=read_target_info(config.target).fingerprint,
        vocab_size=VOCAB_SIZE,
        mask_token_id=MASK_TOKEN_ID,
        on_policy=True,
    )


def tiny_data_set(directory: Path, config: Config, *, samples: int, seed: int = 0) -> DataManifest:
    """Write a data set of random samples over all buckets."""
    return write_tiny_data_set(directory, config, tiny_samples(config, samples=samples, tokens=MASK_TOKEN_ID, seed=seed))


def build_tiny_run(root: Path, *, samples: int = 24, overrides: Sequence[str] = ()) -> TinyRun:
    """Make target, data set, plan and run folder under `root`; `overrides` as on the command line."""
    target = root / "target"
    if not target.exists():
        tiny_target(target)
    text = TINY_CONFIG.format(root=json.dumps(str(root / "runs")), target=json.dumps(str(target)), samples=samples)
    config = parse_config(text, origin="tiny run", overrides=overrides)
    data_dir = root / f"data-{samples}"
    if not data_dir.exists():
        tiny_data_set(data_dir, config, samples=samples)
    fingerprint = json.loads((data_dir / "manifest.json").read_text())["fingerprint"]
    location = str(data_dir)
    paths = RunPaths(root / "runs" / f"tiny-{len(list((root / 'runs').glob('tiny-*'))) + 1:03d}")
    prepare_run(config, paths, location=location, fingerprint=fingerprint)
    with SampleStore(location, fingerprint=fingerprint, reader=config.data.reader) as samples_store:
        prepare_plan(config, samples_store, paths.plan_dir, data_fingerprint=fingerprint)
    return TinyRun(config=config, paths=paths, data_dir=data_dir)


def rewrite_config(run: TinyRun, *, overrides: Sequence[str]) -> TinyRun:
    """Change settings of a prepared run behind its back."""
    config = parse_config(dump_config(run.config), origin="tiny run", overrides=overrides)
    run.paths.config.write_text(dump_config(config))
    return TinyRun(config=config, paths=run.paths, data_dir=run.data_dir)
