"""A prepared run of the shipped target with untrained checkpoints: everything that a probe needs, without any training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from dflash.checkpoint import CheckpointContent, Ledger, RunIdentity, save_checkpoint
from dflash.config import dump_config, parse_config
from dflash.model.drafter import Drafter
from dflash.records import RunPaths, TrainerState
from dflash.stages.prepare import plan_stage, prepare_stage
from dflash.stages.run import Run, reopen_run
from dflash.storage import atomic_write_text
from tests.support.checkpoints import entry, ignore

CONFIG = """
run: {{name: probed, root: {root}}}
target: {{path: demo, mask_token: "<|mask|>"}}
drafter: {{hidden_size: 128, intermediate_size: 64, initializer_range: 0.12}}
data:
  num_conversations: 12
  answers: {{regenerate: false}}
  max_length_tokens: 256
  bucket_edges_tokens: [256]
  max_bad_frac: 0.9
plan: {{tokens_per_batch: 1024}}
train: {{max_steps: 100, epochs: 200}}
checkpoint: {{interval_steps: 10, window_steps: 10, soak_steps: 10}}
evaluate: {{num_prompts: 2, bootstrap_samples: 100}}
probe: {{every_steps: 20, num_prompts: 3, max_new_tokens: 8, batch_size: 2}}
tracking: {{enabled: false}}
"""


def build_probe_run(root: Path, *, overrides: Sequence[str] = ()) -> Run:
    """Make data set and plan under `root`; there are no checkpoints yet."""
    config = parse_config(CONFIG.format(root=json.dumps(str(root))), origin="probe run", overrides=overrides)
    paths = RunPaths(root / "probed-001")
    paths.root.mkdir(parents=True)
    atomic_write_text(paths.config, dump_config(config))
    run = reopen_run(paths.root)
    plan_stage(run, prepare_stage(run, progress=lambda *_: None))
    return run


def save_drafter(run: Run, step: int, *, segment: int = 0, total_steps: int = 100) -> None:
    """A durable checkpoint of an untrained drafter, its weights drawn with the step as the seed."""
    torch.manual_seed(step)
    drafter = Drafter(run.config.drafter, target_hidden_size=128)
    drafter.init_weights(step)
    weights = {name: tensor.detach().clone() for name, tensor in drafter.named_parameters()}
    state = TrainerState(
        step=step, plan_position=step, segment=segment, plan_sha256="p" * 64, config_sha256="c" * 64, seed=1,
        total_steps=total_steps, skipped_positions=(), overlay=None, nonfinite_in_row=0,
    )  # fmt: skip
    identity = RunIdentity(data_fingerprint="d" * 64, target_fingerprint="t" * 64, mask_token_id=3)
    content = CheckpointContent(state=state, identity=identity, drafter=weights, optimizer={"m": torch.zeros(1)})
    save_checkpoint(run.paths.checkpoints_dir, content, created_at="2026-01-01T00:00:00+00:00", on_operation=ignore)
    ledger = Ledger(run.paths.ledger)
    for state_name in ("writing", "durable", "probation"):
        ledger.append(entry(step, state_name, segment=segment))  # type: ignore[arg-type]
