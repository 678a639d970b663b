"""A tiny run whose plan meets bad data: the target's embedding of one token is NaN, and chosen batches contain that token.

The plan depends on lengths alone, so the data set is written twice: once to see which samples the chosen batches hold, and again
with the token in those.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from dflash.config import Config, parse_config
from dflash.data.plan import load_plan, prepare_plan
from dflash.data.reader import SampleStore
from dflash.records import RunPaths
from dflash.train.runs import prepare_run
from tests.support.tiny_run import TINY_CONFIG, tiny_model, tiny_samples, write_tiny_data_set

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
    model = tiny_model(seed=0, hidden_size=16, num_hidden_layers=3, tie_word_embeddings=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    model.save_pretrained(directory, safe_serialization=True)
    return directory


def _write_data(directory: Path, config: Config, *, samples: int, poisoned_rows: frozenset[int]) -> str:
    """The same samples each time, but for the token that is planted in some rows; returns the fingerprint."""
    buckets = tiny_samples(config, samples=samples, tokens=POISON, seed=0)
    rows = [sample for bucket in buckets for sample in bucket]
    for row in poisoned_rows:
        rows[row].input_ids[0] = POISON
    return write_tiny_data_set(directory, config, buckets).fingerprint
