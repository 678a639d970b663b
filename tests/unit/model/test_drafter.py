"""The drafter: golden numbers, the specification written slowly, leaks, decoding against training, names."""

from __future__ import annotations

import math

import model_naive as naive
import pytest
import torch
from model_fixtures import WIDTH, drafter_config, load_golden, sliding_config, tiny_drafter
from torch import Tensor

from dflash.config import DrafterConfig
from dflash.errors import DrafterError
from dflash.model.backends import AttentionBackend, ChunkedAttention
from dflash.model.drafter import Drafter
from dflash.model.lean import LeanAttention

TOKENS = 20
CONFIGS = [
    pytest.param(drafter_config(), id="full"),
    pytest.param(sliding_config(), id="sliding-causal"),
    pytest.param(sliding_config(sliding_causal=False), id="sliding-bidirectional"),
    pytest.param(drafter_config(num_attention_heads=4, num_key_value_heads=1, num_hidden_layers=1), id="one-key-head"),
]


def _batch(config: DrafterConfig, anchors: Tensor, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(anchors.shape[0], TOKENS, len(config.target_layer_ids) * WIDTH, generator=generator)
    embeds = torch.randn(*anchors.shape, config.block_size, WIDTH, generator=generator)
    return features, embeds


@pytest.mark.parametrize("backend", [ChunkedAttention(), LeanAttention()], ids=["chunked", "lean"])
@pytest.mark.parametrize("name", ["full", "sliding"])
def test_hidden_states_equal_the_reference_implementation(name: str, backend: AttentionBackend) -> None:
    golden = load_golden(name)
    golden.drafter.attention = backend
    batch, blocks = golden.anchors.shape
    tokens = torch.full(
        (batch, blocks, golden.drafter.config.block_size), golden.expected["draft_config"]["dflash_config"]["mask_token_id"]
    )
    tokens[..., 0] = golden.input_ids.gather(1, golden.anchors)
    hidden = golden.drafter(
        golden.forward["context_features"], golden.target.embed(tokens), golden.anchors, torch.ones(batch, blocks, dtype=torch.bool)
    )
    torch.testing.assert_close(hidden.flatten(1, 2), golden.forward["draft_hidden"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config", CONFIGS)
def test_hidden_states_equal_the_specification_written_slowly(config: DrafterConfig) -> None:
    drafter = tiny_drafter(config)
    anchors = torch.tensor([[1, 8, 14], [4, 5, 19]])
    features, embeds = _batch(config, anchors)
    hidden = drafter(features, embeds, anchors, torch.ones_like(anchors, dtype=torch.bool))
    for b, n in [(0, 0), (0, 2), (1, 1), (1, 2)]:
        wanted = naive.drafter_block(config, drafter.state_dict(), features[b], embeds[b, n], int(anchors[b, n]))
        torch.testing.assert_close(hidden[b, n], wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("config", CONFIGS)
def test_context_at_or_behind_the_anchor_never_moves_a_block(config: DrafterConfig) -> None:
    drafter = tiny_drafter(config)
    anchors = torch.tensor([[3, 9, 10, 17]])
    keep = torch.ones_like(anchors, dtype=torch.bool)
    features, embeds = _batch(config, anchors)
    before = drafter(features, embeds, anchors, keep)
    for n, anchor in enumerate(anchors[0].tolist()):
        changed = features.clone()
        changed[:, anchor:] += 10.0
        assert torch.equal(drafter(changed, embeds, anchors, keep)[0, n], before[0, n])


@pytest.mark.parametrize("config", CONFIGS)
def test_context_right_before_the_anchor_moves_every_slot(config: DrafterConfig) -> None:
    drafter = tiny_drafter(config)
    anchors = torch.tensor([[3, 9, 10, 17]])
    keep = torch.ones_like(anchors, dtype=torch.bool)
    features, embeds = _batch(config, anchors)
    before = drafter(features, embeds, anchors, keep)
    for n, anchor in enumerate(anchors[0].tolist()):
        changed = features.clone()
        changed[:, anchor - 1] += 1.0
        moved = (drafter(changed, embeds, anchors, keep)[0, n] - before[0, n]).abs().amax(-1)
        assert bool((moved > 1e-4).all())


def test_other_blocks_and_other_sequences_never_move_a_block() -> None:
    config = sliding_config()
    drafter = tiny_drafter(config)
    anchors = torch.tensor([[3, 9, 10], [4, 4, 12]])
    keep = torch.ones_like(anchors, dtype=torch.bool)
    features, embeds = _batch(config, anchors)
    before = drafter(features, embeds, anchors, keep)
    changed_embeds, changed_features = embeds.clone(), features.clone()
    changed_embeds[:, [0, 2]] += 1.0
    changed_features[1] += 1.0
    after = drafter(changed_features, changed_embeds, anchors, keep)
    torch.testing.assert_close(after[0, 1], before[0, 1], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(after[0, 0], before[0, 0], atol=1e-3)


def test_padded_slots_are_zero_without_gradient_and_change_nothing() -> None:
    config = sliding_config()
    drafter = tiny_drafter(config)
    anchors = torch.tensor([[3, 9, 12], [5, 5, 5], [0, 0, 0]])
    keep = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    features, embeds = _batch(config, anchors)
    embeds.requires_grad_()
    hidden = drafter(features, embeds, anchors, keep)
    assert torch.equal(hidden[~keep], torch.zeros_like(hidden[~keep]))
    hidden.square().sum().backward()
    assert embeds.grad is not None
    assert torch.equal(embeds.grad[~keep], torch.zeros_like(embeds.grad[~keep]))
    alone = drafter(features[1:2], embeds[1:2, :1], anchors[1:2, :1], keep[1:2, :1])
    torch.testing.assert_close(hidden[1, :1], alone[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config", CONFIGS)
def test_decoding_with_a_growing_cache_equals_training(config: DrafterConfig) -> None:
    drafter = tiny_drafter(config)
    starts = torch.tensor([[4, 5, 11, 17]])
    anchors = starts.expand(2, -1)
    features, embeds = _batch(config, anchors)
    trained = drafter(features, embeds, anchors, torch.ones_like(anchors, dtype=torch.bool))
    cache, held = drafter.new_cache(), 0
    for n, start in enumerate(starts[0].tolist()):
        drafted = drafter.draft(embeds[:, n], features[:, held:start], cache, start)
        held = start
        assert cache.length_tokens == start
        torch.testing.assert_close(drafted, trained[:, n], atol=1e-5, rtol=1e-5)


def test_cache_survives_the_growth_of_its_buffers() -> None:
    config = drafter_config()
    drafter = tiny_drafter(config)
    features = torch.randn(1, 200, 2 * WIDTH)
    embeds = torch.randn(1, config.block_size, WIDTH)
    cache = drafter.new_cache()
    for start in range(1, 201):
        stepped = drafter.draft(embeds, features[:, start - 1 : start], cache, start)
    at_once = drafter.draft(embeds, features, drafter.new_cache(), 200)
    torch.testing.assert_close(stepped, at_once, atol=1e-5, rtol=1e-5)


def test_a_smaller_block_may_be_drafted_than_was_trained() -> None:
    config = sliding_config()
    drafter = tiny_drafter(config)
    features, embeds = torch.randn(1, 7, 2 * WIDTH), torch.randn(1, 3, WIDTH)
    drafted = drafter.draft(embeds, features, drafter.new_cache(), 7)
    wanted = naive.drafter_block(config, drafter.state_dict(), features[0], embeds[0], 7)
    torch.testing.assert_close(drafted[0], wanted, atol=2e-5, rtol=2e-5)


def test_a_gap_between_cache_and_anchor_is_an_error() -> None:
    config = drafter_config()
    drafter = tiny_drafter(config)
    with pytest.raises(DrafterError, match="do not end right before anchor 9"):
        drafter.draft(torch.randn(1, 6, WIDTH), torch.randn(1, 7, 2 * WIDTH), drafter.new_cache(), 9)


def test_every_parameter_gets_a_gradient() -> None:
    config = sliding_config()
    drafter = tiny_drafter(config)
    anchors = torch.tensor([[6, 12]])
    features, embeds = _batch(config, anchors)
    drafter(features, embeds, anchors, torch.ones_like(anchors, dtype=torch.bool)).square().sum().backward()
    silent = [name for name, parameter in drafter.named_parameters() if parameter.grad is None or not bool(parameter.grad.any())]
    assert silent == []


def test_initial_weights_depend_on_the_seed_alone() -> None:
    config = drafter_config()
    first, second, other = (Drafter(config, target_hidden_size=WIDTH) for _ in range(3))
    first.init_weights(3)
    torch.rand(7)
    second.init_weights(3)
    other.init_weights(4)
    states = [drafter.state_dict() for drafter in (first, second, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["fc.weight"], states[2]["fc.weight"])
    assert torch.equal(states[0]["norm.weight"], torch.ones(WIDTH))
    assert math.isclose(float(states[0]["fc.weight"].std()), config.initializer_range, rel_tol=0.1)


def test_a_drafter_with_half_precision_weights_runs_and_stays_close() -> None:
    config = drafter_config(initializer_range=0.02)
    drafter = tiny_drafter(config)
    anchors = torch.tensor([[6, 12]])
    keep = torch.ones_like(anchors, dtype=torch.bool)
    features, embeds = _batch(config, anchors)
    wanted = drafter(features, embeds, anchors, keep).detach()
    found = drafter.to(torch.bfloat16)(features.bfloat16(), embeds.bfloat16(), anchors, keep).detach()
    assert found.dtype == torch.bfloat16
    assert float((found.float() - wanted).norm() / wanted.norm()) < 0.03


@pytest.mark.parametrize("config", CONFIGS)
def test_mixed_precision_runs_forward_backward_and_drafting(config: DrafterConfig) -> None:
    """Master weights in float32, features and embeddings in bfloat16, as a trainer on a GPU would have them."""
    drafter = tiny_drafter(config)
    anchors = torch.tensor([[6, 12]])
    keep = torch.tensor([[True, False]])
    features, embeds = _batch(config, anchors)
    wanted = drafter(features, embeds, anchors, keep).detach()
    with torch.autocast("cpu", torch.bfloat16):
        found = drafter(features.bfloat16(), embeds.bfloat16(), anchors, keep)
        drafted = drafter.draft(embeds[:, 0].bfloat16(), features[:, :6].bfloat16(), drafter.new_cache(), 6)
    found.float().square().sum().backward()
    assert drafter.fc.weight.grad is not None
    assert drafter.fc.weight.grad.dtype == torch.float32
    distance = (found.detach().float() - wanted)[keep].norm() / wanted[keep].norm()
    assert float(distance) < 0.1
    assert float((drafted.float() - wanted[:, 0]).norm() / wanted[:, 0].norm()) < 0.1
