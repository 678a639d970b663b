"""Nothing behind an anchor reaches its block, through target, features, drafter and any attention backend."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_fixtures import VOCAB, drafter_config, sliding_config, tiny_drafter, tiny_target
from torch import Tensor

from dflash.config import DrafterConfig
from dflash.model.anchors import AnchorSet, block_token_ids
from dflash.model.backends import AttentionBackend, ChunkedAttention
from dflash.model.drafter import Drafter
from dflash.model.lean import LeanAttention
from dflash.model.target import Target

TOKENS, MASK = 40, VOCAB - 1
CONFIGS = {"full": drafter_config(), "sliding": sliding_config(), "sliding-bidirectional": sliding_config(sliding_causal=False)}
BACKENDS = {"chunked": ChunkedAttention(), "lean": LeanAttention()}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("qwen3")


def _drafter(config: DrafterConfig, backend: AttentionBackend) -> Drafter:
    drafter = tiny_drafter(config)
    drafter.attention = backend
    return drafter


def _blocks(target: Target, drafter: Drafter, ids: Tensor, anchors: AnchorSet) -> Tensor:
    features = target.features(ids, torch.full((len(ids),), ids.shape[1]))
    tokens = block_token_ids(ids, anchors, block_size=drafter.config.block_size, mask_token_id=MASK)
    return drafter(features, target.embed(tokens), anchors.positions, anchors.keep).detach()


def _anchors(count: int, seed: int) -> tuple[Tensor, AnchorSet]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(MASK, (1, TOKENS), generator=generator)
    positions = torch.randperm(TOKENS - 1, generator=generator)[:count].sort().values.unsqueeze(0)
    return ids, AnchorSet(positions, torch.ones_like(positions, dtype=torch.bool))


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_tokens_behind_an_anchor_never_change_its_block(target: Target, config: DrafterConfig, backend: AttentionBackend) -> None:
    drafter = _drafter(config, backend)
    ids, anchors = _anchors(11, seed=1)
    before = _blocks(target, drafter, ids, anchors)
    for n, anchor in enumerate(anchors.positions[0].tolist()):
        changed = ids.clone()
        changed[:, anchor + 1 :] = (changed[:, anchor + 1 :] + 7) % MASK  # the anchor's own token is the block's input
        after = _blocks(target, drafter, changed, anchors)
        torch.testing.assert_close(after[:, : n + 1], before[:, : n + 1], atol=2e-5, rtol=2e-5)
        if n + 1 < len(before[0]):
            assert not torch.allclose(after[:, n + 1], before[:, n + 1], atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_features_at_an_anchor_or_behind_it_never_change_its_block(config: DrafterConfig, backend: AttentionBackend) -> None:
    drafter = _drafter(config, backend)
    _, (positions, keep) = _anchors(11, seed=2)
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(1, TOKENS, 2 * config.hidden_size, generator=generator)
    embeds = torch.randn(1, 11, config.block_size, config.hidden_size, generator=generator)
    before = drafter(features, embeds, positions, keep)
    for n, anchor in enumerate(positions[0].tolist()):
        changed = features.clone()
        changed[:, anchor:] = 50.0
        assert torch.equal(drafter(changed, embeds, positions, keep)[:, n], before[:, n])


@settings(max_examples=12, deadline=None, derandomize=True)
@given(count=st.integers(1, 20), seed=st.integers(0, 999), name=st.sampled_from(sorted(CONFIGS)), lean=st.booleans())
def test_order_and_company_of_the_blocks_change_nothing(target: Target, count: int, seed: int, name: str, lean: bool) -> None:
    drafter = _drafter(CONFIGS[name], BACKENDS["lean" if lean else "chunked"])
    ids, anchors = _anchors(count, seed)
    before = _blocks(target, drafter, ids, anchors)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + 1))
    permuted = _blocks(target, drafter, ids, AnchorSet(anchors.positions[:, order], anchors.keep))
    torch.testing.assert_close(permuted, before[:, order], atol=2e-5, rtol=2e-5)
    only = slice(seed % count, seed % count + 1)
    alone = _blocks(target, drafter, ids, AnchorSet(anchors.positions[:, only], anchors.keep[:, only]))
    torch.testing.assert_close(alone, before[:, only], atol=2e-5, rtol=2e-5)
