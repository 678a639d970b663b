"""A tiny run whose plan meets bad data: the target's embedding of one token is NaN, and chosen batches contain that token.

The plan depends on lengths alone, so the data set is written twice: once to see which samples the chosen batches hold, and again
with the token in those.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash.config import Config, parse_config
from dflash.data.buckets import bucket_of
from dflash.data.columns import TokenizedSample
from dflash.data.plan import load_plan, prepare_plan
from dflash.data.reader import SampleStore
from dflash.model.target import read_target_info
from dflash.records import RunPaths
from dflash.storage import open_store
from dflash.train.runs import prepare_run
from tests.support.data_sets import write_samples
from tests.support.tiny_run import MASK_TOKEN_ID, TINY_CONFIG, VOCAB_SIZE

POISON = 46
"""Token whose embedding is NaN."""

SETTINGS = (
    "train.epochs=1",
    "checkpoint.interval_steps=10",
    "checkpoint.window_steps=10",
    "checkpoint.soak_steps=10",
    "health.check_interval_s=0.3",
    "rollback.max_skip_frac=0.2",
    "rollback.region_steps=30",
    "rollback.cooldown_steps=0",
)


def build_poisoned_run(root: Path, *, samples: int, bad: Collection[int], settings: Sequence[str] = ()) -> RunPaths:
    """Make target, data set, plan and run folder under `root`; the batches at the plan positions `bad`, and no others, are bad."""
    target = _poisoned_target(root / "target")
    text = TINY_CONFIG.format(root=json.dumps(str(root / "runs")), target=json.dumps(str(target)), samples=samples)
    config = parse_config(text, origin="poisoned run", overrides=[*SETTINGS, *settings])
    clean = _write_data(root / "clean", config, samples=samples, poisoned_rows=frozenset())
    with SampleStore(str(root / "clean"), fingerprint=clean, reader=config.data.reader) as store:
        prepare_plan(config, store, root / "plan", data_fingerprint=clean)
    plan = load_plan(root / "plan")
    rows = frozenset(plan[position].rows[0] for position in bad)
    data = root / "data"
    fingerprint = _write_data(data, config, samples=samples, poisoned_rows=rows)
    paths = RunPaths(root / "runs" / "tiny-001")
    prepare_run(config, paths, location=str(data), fingerprint=fingerprint)
    with SampleStore(str(data), fingerprint=fingerprint, reader=config.data.reader) as store:
        prepare_plan(config, store, paths.plan_dir, data_fingerprint=fingerprint)
    planned = load_plan(paths.plan_dir)
    found = {position for position in range(len(planned)) if rows & set(planned[position].rows)}
    assert found == set(bad), "the plan depends on lengths alone"
    return paths


def _poisoned_target(directory: Path) -> Path:
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, tie_word_embeddings=False, initializer_range=0.2,
        eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3ForCausalLM(shape).float()
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    model.save_pretrained(directory, safe_serialization=True)
    return directory


def _write_data(directory: Path, config: Config, *, samples: int, poisoned_rows: frozenset[int]) -> str:
    """The same samples each time, but for the token that is planted in some rows; returns the fingerprint."""
    generator = np.random.default_rng(0)
    edges = config.data.bucket_edges_tokens
    assert not isinstance(edges, str)
    buckets: list[list[TokenizedSample]] = [[] for _ in edges]
    for number in range(samples):
        length = int(generator.integers(6, edges[-1] + 1))
        prompt = int(generator.integers(2, length - 3))
        ids = (np.cumsum(generator.integers(1, 3, length)) % POISON).astype(np.int32)
        buckets[bucket_of(length, edges)].append(TokenizedSample(f"s{number}", "walk", ids, ((prompt, length),), turns=2))
    row = 0
    for bucket in buckets:
        for sample in bucket:
            if row in poisoned_rows:
                sample.input_ids[0] = POISON
            row += 1
    write_samples(
        open_store(directory), buckets, edges=edges, rows_per_shard=64, rows_per_group=8,
        target_fingerprint=read_target_info(config.target).fingerprint, vocab_size=VOCAB_SIZE, mask_token_id=MASK_TOKEN_ID,
        on_policy=True,
    )  # fmt: skip
    return str(json.loads((directory / "manifest.json").read_text())["fingerprint"])
