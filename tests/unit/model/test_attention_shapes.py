"""Every attention backend against a dense masked softmax in float64, over random shapes and at every edge of a sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash.model.attention import BlockLayout, Visibility, attend_one_block
from dflash.model.backends import AttentionBackend, ChunkedAttention
from dflash.model.lean import LeanAttention

BACKENDS: dict[str, AttentionBackend] = {"chunked": ChunkedAttention(), "lean": LeanAttention()}
Leaves = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def dense(leaves: Leaves, anchors: Tensor, kind: Visibility) -> Tensor:
    """The rule over the whole [N*K, S + N*K] mask, which no backend ever builds."""
    q, k, v, own_k, own_v = (leaf.double() for leaf in leaves)
    batch, blocks, slots, heads, width = q.shape
    tokens, block_of = k.shape[2], torch.arange(blocks).repeat_interleave(slots)
    slot_of, column = torch.arange(slots).repeat(blocks), torch.arange(tokens)
    anchor = anchors[:, block_of, None]
    sees = column < anchor
    if kind.window is not None:
        sees = sees & (column >= anchor + slot_of[:, None] - (kind.window - 1))
    own = (block_of[:, None] == block_of) & ((slot_of <= slot_of[:, None]) | (not kind.causal))
    mask = torch.cat((sees, own.expand(batch, -1, -1)), -1)[:, None]
    keys, values = (
        torch.cat((seen, mine.flatten(1, 2).transpose(1, 2)), 2).repeat_interleave(heads // k.shape[1], 1)
        for seen, mine in ((k, own_k), (v, own_v))
    )
    scores = q.flatten(1, 2).transpose(1, 2) @ keys.transpose(2, 3) / width**0.5
    mixed = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ values
    return mixed.transpose(1, 2).reshape(batch, blocks, slots, heads * width)


def inputs(anchors: Tensor, *, tokens: int, slots: int, key_heads: int, groups: int, width: int, seed: int) -> Leaves:
    generator = torch.Generator().manual_seed(seed)
    batch, blocks = anchors.shape
    own = (batch, blocks, slots, key_heads, width)
    shapes = ((batch, blocks, slots, key_heads * groups, width), *[(batch, key_heads, tokens, width)] * 2, own, own)
    made = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    return made[0], made[1], made[2], made[3], made[4]


def compare(backend: AttentionBackend, leaves: Leaves, anchors: Tensor, keep: Tensor, kind: Visibility) -> None:
    q, k, v, own_k, own_v = leaves
    layout = BlockLayout(anchors, keep, k.shape[2], q.shape[2], q.shape[3] // k.shape[1])
    plan = backend.plan(layout, visibility=kind, dtype=torch.float32)
    found = backend.attend(q, (k, v), (own_k, own_v), plan)
    wanted = dense(leaves, anchors, kind).float()
    torch.testing.assert_close(found[keep], wanted[keep], atol=1e-5, rtol=1e-5)
    if bool(keep.any()):
        pull = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)) * keep[:, :, None, None]
        ours = torch.autograd.grad((found * pull).sum(), leaves)
        theirs = torch.autograd.grad((wanted * pull).sum(), leaves)
        for own, reference in zip(ours, theirs, strict=True):
            torch.testing.assert_close(own, reference, atol=1e-5, rtol=1e-5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tokens=st.integers(1, 33),
    slots=st.integers(1, 17),
    key_heads=st.integers(1, 3),
    groups=st.integers(1, 5),
    width=st.sampled_from([2, 4, 16]),
    blocks=st.integers(1, 20),
    batch=st.integers(1, 3),
    window=st.sampled_from([None, 1, 2, 7, 16, 17, 40, 10_000]),
    causal=st.booleans(),
    kept_share=st.sampled_from([0.0, 0.3, 1.0]),
    backend=st.sampled_from(sorted(BACKENDS)),
    seed=st.integers(0, 999),
)
def test_random_shapes(
    tokens: int, slots: int, key_heads: int, groups: int, width: int, blocks: int, batch: int, window: int | None, causal: bool,
    kept_share: float, backend: str, seed: int,
) -> None:  # fmt: skip
    """Windows under a block and over the sequence, flags anywhere (not only at the end), anchors repeated and unsorted."""
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.randint(tokens, (batch, blocks), generator=generator)
    keep = torch.rand(batch, blocks, generator=generator) < kept_share
    leaves = inputs(anchors, tokens=tokens, slots=slots, key_heads=key_heads, groups=groups, width=width, seed=seed)
    compare(BACKENDS[backend], leaves, anchors, keep, Visibility(window=window, causal=causal))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(
    "places",
    [
        pytest.param([[0]], id="nothing to see"),
        pytest.param([[11]], id="the last token"),
        pytest.param([[0, 11]], id="both ends"),
        pytest.param([[4, 5, 6]], id="neighbours"),
        pytest.param([[3, 3, 3]], id="one place three times"),
        pytest.param([list(range(12))], id="every token"),
        pytest.param([[0] * 9, [11] * 9], id="rows that share no context"),
    ],
)
def test_edges_of_a_sequence(places: list[list[int]], window: int | None, name: str) -> None:
    anchors = torch.tensor(places)
    leaves = inputs(anchors, tokens=12, slots=5, key_heads=2, groups=3, width=4, seed=7)
    compare(BACKENDS[name], leaves, anchors, torch.ones_like(anchors, dtype=torch.bool), Visibility(window=window, causal=True))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_sequence_without_any_block_beside_one_with_many(name: str) -> None:
    anchors = torch.stack((torch.zeros(10, dtype=torch.long), torch.arange(2, 12)))
    keep = torch.tensor([[False] * 10, [True] * 10])
    leaves = inputs(anchors, tokens=12, slots=4, key_heads=1, groups=2, width=8, seed=3)
    compare(BACKENDS[name], leaves, anchors, keep, Visibility(window=5, causal=False))
    q, k, v, own_k, own_v = leaves
    plan = BACKENDS[name].plan(BlockLayout(anchors, keep, 12, 4, 2), visibility=Visibility(5, causal=False), dtype=torch.float32)
    gradients = torch.autograd.grad(BACKENDS[name].attend(q, (k, v), (own_k, own_v), plan).sum(), leaves)
    assert all(not bool(gradient[0].any()) for gradient in gradients), "the empty row sends nothing back"
    assert all(bool(gradient[1].any()) for gradient in gradients)


@pytest.mark.parametrize("name", BACKENDS)
def test_scores_of_a_thousand_do_not_overflow(name: str) -> None:
    anchors = torch.tensor([[1, 6, 9]])
    leaves = inputs(anchors, tokens=12, slots=4, key_heads=2, groups=2, width=8, seed=5)
    with torch.no_grad():
        leaves[0].mul_(1000.0)
    q, k, v, own_k, own_v = leaves
    keep = torch.ones_like(anchors, dtype=torch.bool)
    plan = BACKENDS[name].plan(BlockLayout(anchors, keep, 12, 4, 2), visibility=Visibility(None, causal=False), dtype=torch.float32)
    found = BACKENDS[name].attend(q, (k, v), (own_k, own_v), plan)
    torch.testing.assert_close(found, dense(leaves, anchors, Visibility(None, causal=False)).float(), atol=1e-3, rtol=1e-3)
    assert all(bool(part.isfinite().all()) for part in torch.autograd.grad(found.sum(), leaves))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    start=st.integers(0, 30),
    slots=st.integers(1, 17),
    groups=st.integers(1, 4),
    window=st.sampled_from([None, 1, 4, 9, 31, 500]),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_decoding_sees_what_training_saw(start: int, slots: int, groups: int, window: int | None, causal: bool, seed: int) -> None:
    anchors = torch.full((2, 1), start)
    q, k, v, own_k, own_v = inputs(anchors, tokens=start, slots=slots, key_heads=2, groups=groups, width=4, seed=seed)
    kind = Visibility(window=window, causal=causal)
    found = attend_one_block(q[:, 0], (k, v), (own_k[:, 0], own_v[:, 0]), visibility=kind)
    wanted = dense((q, k, v, own_k, own_v), anchors, kind)[:, 0].float()
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
