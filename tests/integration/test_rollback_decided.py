"""The whole loop with nothing but real parts: bad data, a trainer, the health check that sees it, the supervisor that acts.

The target's embedding of one token is NaN and three batches in a row of the plan contain that token. Their updates are not finite;
the health check decides to go back to a clean checkpoint and to leave these batches out, and the run ends without them.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash.checkpoint import read_ledger, read_state
from dflash.config import Config, parse_config
from dflash.data.buckets import bucket_of
from dflash.data.columns import TokenizedSample
from dflash.data.plan import load_plan, prepare_plan
from dflash.data.reader import SampleStore
from dflash.errors import HaltedError
from dflash.model.target import read_target_info
from dflash.records import RollbackEntry, RunPaths
from dflash.stages import reopen_run, train_stage
from dflash.storage import open_store
from dflash.train.processes import recorded_processes
from dflash.train.runs import prepare_run
from tests.support.data_sets import write_samples
from tests.support.tiny_run import MASK_TOKEN_ID, TINY_CONFIG, VOCAB_SIZE
from tests.support.trainer_process import live_steps, log_lines

POISON = 46
"""Token whose embedding is NaN."""

SAMPLES = 400
FIRST_BAD, BAD_BATCHES = 70, 3

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


def poisoned_target(directory: Path) -> Path:
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


def write_data(directory: Path, config: Config, *, poisoned_rows: frozenset[int]) -> str:
    """The same samples each time, but for the token that is planted in some rows; returns the fingerprint."""
    generator = np.random.default_rng(0)
    edges = config.data.bucket_edges_tokens
    assert not isinstance(edges, str)
    buckets: list[list[TokenizedSample]] = [[] for _ in edges]
    for number in range(SAMPLES):
        length = int(generator.integers(6, edges[-1] + 1))
        prompt = int(generator.integers(2, length - 3))
        ids = (np.cumsum(generator.integers(1, 3, length)) % POISON).astype(np.int32)
        buckets[bucket_of(length, edges)].append(TokenizedSample(f"s{number}", "walk", ids, ((prompt, length),), turns=2))
    row = 0
    for samples in buckets:
        for sample in samples:
            if row in poisoned_rows:
                sample.input_ids[0] = POISON
            row += 1
    write_samples(
        open_store(directory), buckets, edges=edges, rows_per_shard=64, rows_per_group=8,
        target_fingerprint=read_target_info(config.target).fingerprint, vocab_size=VOCAB_SIZE, mask_token_id=MASK_TOKEN_ID,
        on_policy=True,
    )  # fmt: skip
    return str(json.loads((directory / "manifest.json").read_text())["fingerprint"])


def prepare(root: Path, *, settings: tuple[str, ...] = ()) -> RunPaths:
    """A run whose plan meets the planted token in the batches [FIRST_BAD, FIRST_BAD + BAD_BATCHES)."""
    target = poisoned_target(root / "target")
    text = TINY_CONFIG.format(root=json.dumps(str(root / "runs")), target=json.dumps(str(target)), samples=SAMPLES)
    config = parse_config(text, origin="poisoned run", overrides=[*SETTINGS, *settings])
    clean = write_data(root / "clean", config, poisoned_rows=frozenset())
    with SampleStore(str(root / "clean"), fingerprint=clean, reader=config.data.reader) as store:
        prepare_plan(config, store, root / "plan", data_fingerprint=clean)
    plan = load_plan(root / "plan")
    bad = range(FIRST_BAD, FIRST_BAD + BAD_BATCHES)
    rows = frozenset(plan[position].rows[0] for position in bad)
    data = root / "data"
    fingerprint = write_data(data, config, poisoned_rows=rows)
    paths = RunPaths(root / "runs" / "tiny-001")
    prepare_run(config, paths, location=str(data), fingerprint=fingerprint)
    with SampleStore(str(data), fingerprint=fingerprint, reader=config.data.reader) as store:
        prepare_plan(config, store, paths.plan_dir, data_fingerprint=fingerprint)
    planned = load_plan(paths.plan_dir)
    found = [position for position in range(len(planned)) if rows & set(planned[position].rows)]
    assert found == list(bad), "the plan depends on lengths alone"
    return paths


def rollbacks_of(paths: RunPaths) -> list[RollbackEntry]:
    return [line for line in read_ledger(paths.ledger) if isinstance(line, RollbackEntry)]


@pytest.mark.parametrize(
    "limit", [3, pytest.param(50, marks=pytest.mark.full)], ids=["the trainer gives up", "the trainer goes on skipping"]
)
def test_a_run_that_meets_bad_data_goes_back_leaves_it_out_and_finishes(tmp_path: Path, limit: int) -> None:
    paths = prepare(tmp_path, settings=(f"train.max_nonfinite_in_row={limit}",))
    outcome = train_stage(reopen_run(paths.root), on_progress=lambda _progress: None)
    lines = rollbacks_of(paths)
    assert [line.phase for line in lines] == ["begin", "end"]
    plan = lines[0].plan
    bad = set(range(FIRST_BAD, FIRST_BAD + BAD_BATCHES))
    assert plan.rung == 1
    assert bad <= {position for first, end in plan.skip for position in range(first, end)}
    assert lines[1].target_step is not None
    assert lines[1].target_step <= FIRST_BAD
    assert (outcome.rollbacks, outcome.restarts) == (1, 0)

    live = live_steps(paths)
    assert list(live) == list(range(outcome.steps))
    assert not any(record["skipped"] for record in live.values()), "no live record is damaged"
    consumed = [item["batch_id"] for record in live.values() for item in record["micro_batches"]]
    assert not bad & set(consumed)
    assert len(consumed) == len(set(consumed)), "nothing is trained on twice"
    state = read_state(paths.checkpoint(outcome.steps))
    assert bad <= set(state.skipped_positions)
    events = [line["event"] for line in log_lines(paths) if line["kind"] == "event"]
    assert events.count("rollback_begin") == events.count("rollback_end") == 1
    assert sum(line.get("event") == "skip" for line in log_lines(paths)) >= BAD_BATCHES
    acknowledged = list(paths.requests_dir.glob("*.ack.json"))
    assert len(acknowledged) == 1
    assert recorded_processes(paths) == []


def test_without_rollbacks_the_same_run_is_halted(tmp_path: Path) -> None:
    paths = prepare(tmp_path, settings=("rollback.enabled=false",))
    with pytest.raises(HaltedError, match="switched off"):
        train_stage(reopen_run(paths.root), on_progress=lambda _progress: None)
    assert [line.phase for line in rollbacks_of(paths)] == ["halt"]
    assert recorded_processes(paths) == []
