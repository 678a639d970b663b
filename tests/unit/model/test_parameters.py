"""The parameter table against the module itself, and the published size."""

from __future__ import annotations

import sys
from subprocess import run

import pytest
import torch
from model_fixtures import WIDTH, drafter_config, sliding_config

from dflash.config import DrafterConfig
from dflash.model.drafter import Drafter
from dflash.model.parameters import drafter_parameter_count, drafter_shapes

PUBLISHED = DrafterConfig(
    num_hidden_layers=5,
    hidden_size=5120,
    intermediate_size=17408,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    block_size=16,
    target_layer_ids=(1, 16, 31, 46, 61),
    layer_types=("sliding_attention",) * 4 + ("full_attention",),
    sliding_window=2048,
    rope_theta=1e7,
)


@pytest.mark.parametrize("config", [drafter_config(), sliding_config(num_key_value_heads=1, target_layer_ids=(0, 1, 2))])
def test_table_equals_the_module(config: DrafterConfig) -> None:
    drafter = Drafter(config, target_hidden_size=WIDTH)
    state = {name: tuple(value.shape) for name, value in drafter.state_dict().items()}
    assert drafter_shapes(config, target_hidden_size=WIDTH) == state
    assert drafter_parameter_count(config, WIDTH) == sum(parameter.numel() for parameter in drafter.parameters())


def test_published_shape_has_58_tensors_and_1_73_billion_parameters() -> None:
    with torch.device("meta"):
        drafter = Drafter(PUBLISHED, target_hidden_size=5120)
    assert len(drafter.state_dict()) == 58
    count = drafter_parameter_count(PUBLISHED, 5120)
    assert count == sum(parameter.numel() for parameter in drafter.parameters())
    assert round(count / 1e9, 2) == 1.73


def test_counting_needs_no_torch() -> None:
    code = "import sys, dflash.model.parameters; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code], check=False).returncode == 0
