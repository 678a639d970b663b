"""Chunked block attention against one query at a time."""

from __future__ import annotations

import model_naive as naive
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash.model import attention
from dflash.model.attention import BlockLayout, Visibility, attend_blocks, attend_one_block, plan_chunks
from dflash.model.backends import AttentionBackend, ChunkedAttention
from dflash.model.lean import LeanAttention

HEADS, KEY_HEADS, WIDTH, SLOTS = 4, 2, 8, 4
FULL = Visibility(window=None, causal=False)
KINDS = [
    pytest.param(FULL, id="full"),
    pytest.param(Visibility(window=6, causal=True), id="sliding-causal"),
    pytest.param(Visibility(window=5, causal=False), id="sliding-bidirectional"),
    pytest.param(Visibility(window=None, causal=True), id="causal"),
]


def _inputs(anchors: Tensor, tokens: int, *, seed: int = 0) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    torch.manual_seed(seed)
    batch, blocks = anchors.shape
    make = lambda *shape: torch.randn(*shape, requires_grad=True)  # noqa: E731
    queries = make(batch, blocks, SLOTS, HEADS, WIDTH)
    context = (make(batch, KEY_HEADS, tokens, WIDTH), make(batch, KEY_HEADS, tokens, WIDTH))
    block = (make(batch, blocks, SLOTS, KEY_HEADS, WIDTH), make(batch, blocks, SLOTS, KEY_HEADS, WIDTH))
    return queries, context, block


def _chunks(anchors: Tensor, kind: Visibility) -> tuple[attention.AttentionChunk, ...]:
    return plan_chunks(_layout(anchors), visibility=kind, dtype=torch.float32)


def _layout(anchors: Tensor, keep: Tensor | None = None) -> BlockLayout:
    flags = torch.ones_like(anchors, dtype=torch.bool) if keep is None else keep
    return BlockLayout(anchors, flags, context_tokens=40, block_size=SLOTS, groups=HEADS // KEY_HEADS)


@pytest.mark.parametrize("backend", [ChunkedAttention(), LeanAttention()], ids=["chunked", "lean"])
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients_equal_the_query_by_query_reference(kind: Visibility, backend: AttentionBackend) -> None:
    anchors = torch.tensor([[1, 3, 4, 9, 10, 11, 12, 13, 14, 15, 16], [0, 0, 2, 2, 5, 6, 7, 8, 17, 18, 18]])
    queries, context, block = _inputs(anchors, 19)
    found = backend.attend(queries, context, block, backend.plan(_layout(anchors), visibility=kind, dtype=torch.float32))
    _same_as_the_reference(found, (queries, *context, *block), anchors, kind, torch.ones_like(anchors, dtype=torch.bool))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    blocks=st.integers(1, 19),
    kept=st.lists(st.integers(0, 19), min_size=1, max_size=3),
    window=st.sampled_from([None, 2, 5, 30]),
    causal=st.booleans(),
    lean=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_batch_with_padded_slots_equals_the_reference(
    blocks: int, kept: list[int], window: int | None, causal: bool, lean: bool, seed: int
) -> None:
    """Rows with fewer blocks, or with none, leave chunks out; nothing of a padded slot reaches anything."""
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.randint(12, (len(kept), blocks), generator=generator).sort().values
    keep = torch.arange(blocks) < torch.tensor(kept).unsqueeze(1)
    kind = Visibility(window=window, causal=causal)
    queries, context, block = _inputs(anchors, 12, seed=seed)
    backend: AttentionBackend = LeanAttention() if lean else ChunkedAttention()
    found = backend.attend(queries, context, block, backend.plan(_layout(anchors, keep), visibility=kind, dtype=torch.float32))
    if bool(keep.any()):
        _same_as_the_reference(found, (queries, *context, *block), anchors, kind, keep)
    else:
        assert not bool(found.any())


def _same_as_the_reference(found: Tensor, leaves: tuple[Tensor, ...], anchors: Tensor, kind: Visibility, keep: Tensor) -> None:
    queries, *rest = leaves
    wanted = naive.attention(queries, (rest[0], rest[1]), (rest[2], rest[3]), anchors, kind.window, kind.causal)
    torch.testing.assert_close(found[keep], wanted[keep], atol=1e-5, rtol=1e-5)
    direction = torch.randn_like(found) * keep[:, :, None, None]
    found_gradients = torch.autograd.grad((found * direction).sum(), leaves)
    wanted_gradients = torch.autograd.grad((wanted * direction).sum(), leaves)
    for ours, reference in zip(found_gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_order_of_the_blocks_changes_nothing(kind: Visibility) -> None:
    anchors = torch.tensor([[2, 5, 7, 8, 11, 12, 13, 14, 15, 16]])
    order = torch.tensor([7, 2, 9, 0, 4, 1, 8, 3, 6, 5])
    queries, context, block = _inputs(anchors, 18)
    sorted_output = attend_blocks(queries, context, block, _chunks(anchors, kind))
    shuffled = (block[0][:, order], block[1][:, order])
    shuffled_output = attend_blocks(queries[:, order], context, shuffled, _chunks(anchors[:, order], kind))
    torch.testing.assert_close(shuffled_output, sorted_output[:, order], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_alone_equals_the_block_among_others(kind: Visibility) -> None:
    anchors = torch.tensor([[2, 5, 7, 8, 11, 12, 13, 14, 15, 16]])
    queries, context, block = _inputs(anchors, 18)
    together = attend_blocks(queries, context, block, _chunks(anchors, kind))
    for n in range(anchors.shape[1]):
        only = slice(n, n + 1)
        alone = attend_blocks(queries[:, only], context, (block[0][:, only], block[1][:, only]), _chunks(anchors[:, only], kind))
        torch.testing.assert_close(alone, together[:, only], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_attention_equals_training_attention(kind: Visibility) -> None:
    start = 13
    anchors = torch.full((2, 1), start)
    queries, context, block = _inputs(anchors, start)
    trained = attend_blocks(queries, context, block, _chunks(anchors, kind))[:, 0]
    decoded = attend_one_block(queries[:, 0], context, (block[0][:, 0], block[1][:, 0]), visibility=kind)
    torch.testing.assert_close(decoded, trained, atol=1e-6, rtol=1e-5)


def test_chunks_cover_every_block_once_and_touch_no_context_behind_their_last_anchor() -> None:
    anchors = torch.arange(3, 3 + 19).unsqueeze(0)
    chunks = _chunks(anchors, FULL)
    assert [chunk.first_block for chunk in chunks[1:]] == [chunk.last_block for chunk in chunks[:-1]]
    assert (chunks[0].first_block, chunks[-1].last_block) == (0, 19)
    for chunk in chunks:
        assert chunk.last_token == int(anchors[0, chunk.last_block - 1])
        assert chunk.last_block - chunk.first_block <= attention.BLOCKS_PER_CHUNK


def test_masks_are_small_however_many_blocks_there_are() -> None:
    blocks, tokens = 64, 512
    anchors = torch.linspace(8, tokens - 1, blocks).long().unsqueeze(0)
    chunks = _chunks(anchors, FULL)
    largest = max(chunk.mask.numel() for chunk in chunks)
    dense = blocks * SLOTS * (tokens + blocks * SLOTS)
    assert largest <= (HEADS // KEY_HEADS) * attention.BLOCKS_PER_CHUNK * SLOTS * (tokens + attention.BLOCKS_PER_CHUNK * SLOTS)
    assert largest < dense / 4


def test_sliding_chunks_start_where_their_earliest_window_does() -> None:
    anchors = torch.tensor([[20, 21, 22, 30, 40, 41, 42, 43, 44, 45]])
    chunks = _chunks(anchors, Visibility(window=4, causal=True))
    assert [chunk.first_token for chunk in chunks] == [17, 38]


def test_padded_slots_cost_no_attention() -> None:
    anchors = torch.tensor([[*range(1, 33)], [5] * 32, [0] * 32])
    keep = torch.zeros(3, 32, dtype=torch.bool)
    keep[0], keep[1, :3] = True, True
    chunks = plan_chunks(_layout(anchors, keep), visibility=FULL, dtype=torch.float32)
    assert [chunk.rows if chunk.rows is None else chunk.rows.tolist() for chunk in chunks] == [[0, 1], [0], [0], [0]]
    assert [len(chunk.mask) for chunk in chunks] == [2, 1, 1, 1]
    nothing = plan_chunks(_layout(anchors, torch.zeros_like(keep)), visibility=FULL, dtype=torch.float32)
    assert nothing == ()


def test_the_lean_backend_keeps_no_copy_of_the_context() -> None:
    anchors = torch.arange(8, 72).unsqueeze(0)
    queries, context, block = _inputs(anchors, 80)
    sizes = {}
    for backend in (ChunkedAttention(), LeanAttention()):
        kept: dict[int, int] = {}

        def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        plan = backend.plan(_layout(anchors), visibility=FULL, dtype=torch.float32)
        masks = sum(chunk.mask.untyped_storage().nbytes() for chunk in plan)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            backend.attend(queries, context, block, plan)
        shared = masks if backend.name == "chunked" else 0
        sizes[backend.name] = sum(kept.values()) - shared
    inputs = sum(leaf.nbytes for leaf in (queries, *context, *block))
    assert sizes["lean"] < 1.6 * inputs < sizes["chunked"]
