"""The memory plan's weight items against the tensors that really exist."""

from __future__ import annotations

import pytest

from dflash.config import Config, parse_config
from dflash.model.drafter import Drafter
from dflash.train.optimizer import build_optimizer, optimizer_tensors
from dflash.train.weight_memory import checkpoint_bytes_per_parameter, weight_items

SLACK = 1.02
"""Vectors keep two moments and a step under either optimizer."""


def config_of(*overrides: str) -> Config:
    return parse_config("target: {mask_token_id: 3}\ndata: {num_conversations: 5}", origin="test", overrides=overrides)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_moments_and_checkpoint_are_what_the_optimizer_keeps(kind: str) -> None:
    config = config_of(f"train.optimizer.kind={kind}")
    drafter = Drafter(config.drafter, target_hidden_size=128)
    weights = sum(4 * parameter.numel() for parameter in drafter.parameters())
    moments = optimizer_tensors(drafter, build_optimizer(drafter, config.train.optimizer, lr=1.0))
    kept = sum(4 * tensor.numel() for tensor in moments.values())
    items = dict(weight_items(config, target_hidden_size=128))
    planned = next(size for name, size in items.items() if "moment" in name.lower())
    assert planned <= kept <= SLACK * planned
    assert items["drafter master weights, fp32"] == items["gradients, fp32"] == weights
    assert checkpoint_bytes_per_parameter(config) * weights // 4 == weights + planned


def test_sharding_divides_what_lasts_and_adds_what_is_gathered_for_a_while() -> None:
    common = ("cluster.replicas=4", "drafter.num_hidden_layers=6")
    whole = dict(weight_items(config_of(*common), target_hidden_size=128))
    parts = dict(weight_items(config_of(*common, "cluster.shard=true"), target_hidden_size=128))
    assert parts["drafter master weights, fp32, 1/4 of them"] * 4 == whole["drafter master weights, fp32"]
    assert parts["Adam moments, 2 x fp32, 1/4 of them"] * 4 == whole["Adam moments, 2 x fp32"]
    gathered = next(size for name, size in parts.items() if name.startswith("gathered"))
    assert 0 < gathered < whole["drafter master weights, fp32"]
    assert sum(parts.values()) < sum(whole.values())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("cluster.shard=true",), "there is only one"),
        (("cluster.shard=true", "cluster.replicas=2", "cluster.device=cuda", "train.compile=true"), "choose one"),
    ],
)
def test_sharding_that_makes_no_sense_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(Exception, match=message):
        config_of(*overrides)
