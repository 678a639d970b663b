"""A run whose first weights are a published drafter's, and a published drafter measured on a run's prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash.config import parse_config
from dflash.model.drafter import Drafter
from dflash.model.export import describe_export, export_drafter
from dflash.model.frozen_tables import frozen_tables
from dflash.model.target_info import read_target_info
from dflash.stages import Run, evaluate_published, open_run, plan_stage, prepare_stage
from dflash.train.worker import train_segment
from tests.support.tiny_run import MASK_TOKEN_ID, build_tiny_run, rewrite_config

CONFIG = """
run: {{name: published, root: {root}}}
target: {{path: demo, mask_token: "<|mask|>"}}
data:
  num_conversations: 16
  answers: {{max_new_tokens: 24, batch_size: 16, keep_unfinished: true}}
evaluate: {{num_prompts: 3, max_new_tokens: 16}}
tracking: {{enabled: false}}
"""


def test_the_first_checkpoint_holds_the_published_weights(tmp_path: Path) -> None:
    run = build_tiny_run(tmp_path, overrides=["train.max_steps=2"])
    info = read_target_info(run.config.target)
    drafter = Drafter(run.config.drafter, target_hidden_size=16)
    drafter.init_weights(77)
    description = describe_export(run.config.drafter, info, mask_token_id=MASK_TOKEN_ID, target_name="t")
    tables = frozen_tables(Path(info.location))
    folder = export_drafter(
        drafter, tmp_path / "published", description=description, layout="speculators", dtype="float32", tables=tables
    )
    run = rewrite_config(run, overrides=[f"train.init_from={folder}"])
    assert train_segment(run.paths, segment=0, resume_step=None, on_operation=lambda _: None) == 0
    first, last = (load_file(run.paths.checkpoint(step) / "drafter.safetensors") for step in (0, 2))
    for name, value in drafter.state_dict().items():
        assert torch.equal(first[name], value)
    assert any(not torch.equal(first[name], last[name]) for name in first), "and training goes on from there"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("evaluated") / "runs"
    opened = open_run(parse_config(CONFIG.format(root=root), origin="test"))
    plan_stage(opened, prepare_stage(opened, progress=lambda *_: None))
    return opened


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_a_published_drafter_of_its_own_shape_is_measured_on_the_runs_prompts(layout: str, run: Run, tmp_path: Path) -> None:
    own = run.config.drafter.model_copy(update={"target_layer_ids": (0, 2), "block_size": 4, "num_hidden_layers": 2})
    info = read_target_info(run.config.target)
    drafter = Drafter(own, target_hidden_size=info.hidden_size)
    drafter.init_weights(5)
    description = describe_export(own, info, mask_token_id=3, target_name="demo")
    tables = frozen_tables(Path(info.location))
    folder = export_drafter(
        drafter,
        tmp_path / layout,
        description=description,
        layout=layout,
        dtype="float32",
        tables=tables,  # type: ignore[arg-type]
    )
    result = evaluate_published(run, folder, progress=lambda *_: None)
    assert (result.drafter, result.step, result.block_size, result.prompts) == ("published", None, 4, 3)
    assert result.lossless
    assert result.acceptance_length >= 1.0
    stored = json.loads((run.paths.eval_dir / f"published-{layout}" / "result.json").read_text())
    assert stored["block_size"] == 4
