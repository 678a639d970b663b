"""Flex attention's masks against the visibility rule pair by pair; the kernel itself where a device can run it."""

from __future__ import annotations

import model_naive as naive
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_fixtures import drafter_config, sliding_config
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from dflash.errors import DeviceError
from dflash.model import flex, lean
from dflash.model.attention import BlockLayout, Visibility
from dflash.model.backends import AttentionBackend, ChunkedAttention, choose_attention, probe

KINDS = st.builds(Visibility, window=st.sampled_from([None, 3, 7, 40]), causal=st.booleans())
CPU = torch.device("cpu")


@st.composite
def layouts(draw: st.DrawFn, *, most_blocks: int = 11) -> BlockLayout:
    """Sorted anchors with padded slots behind them, any K, context not a multiple of anything."""
    tokens, block_size = draw(st.integers(2, 60)), draw(st.integers(2, 9))
    batch, blocks = draw(st.integers(1, 2)), draw(st.integers(1, most_blocks))
    anchors, keep = torch.zeros(batch, blocks, dtype=torch.long), torch.zeros(batch, blocks, dtype=torch.bool)
    for row in range(batch):
        count = draw(st.integers(1, blocks))
        anchors[row, :count] = torch.tensor(sorted(draw(st.lists(st.integers(0, tokens - 1), min_size=count, max_size=count))))
        keep[row, :count] = True
    return BlockLayout(anchors, keep, context_tokens=tokens, block_size=block_size, groups=2)


def _visible(layout: BlockLayout, kind: Visibility) -> Tensor:
    """Dense [B, N*K, S + N*K], from the sentences of the specification."""
    anchors, keep, tokens, block_size, _ = layout
    batch, blocks = anchors.shape
    seen = torch.zeros(batch, blocks * block_size, tokens + blocks * block_size, dtype=torch.bool)
    for b in range(batch):
        for n in range(blocks):
            anchor = int(anchors[b, n]) if keep[b, n] else 0
            for k in range(block_size):
                context, slots = naive.visible(anchor, k, window=kind.window, causal=kind.causal, block_size=block_size)
                seen[b, n * block_size + k, context] = True
                seen[b, n * block_size + k, [tokens + n * block_size + slot for slot in slots]] = True
    return seen


@settings(max_examples=60, deadline=None, derandomize=True)
@given(layout=layouts(), kind=KINDS, tile=st.sampled_from([4, 8, 16, 128]))
def test_tiles_and_mask_function_name_exactly_the_visible_pairs(layout: BlockLayout, kind: Visibility, tile: int) -> None:
    padded = flex.on_ladder(layout)
    wanted = _visible(padded, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "TILE", tile)
        mask = flex.tile_mask(padded, kind)
    batch, queries, keys = wanted.shape
    index = [torch.arange(size).view(shape) for size, shape in ((batch, (-1, 1, 1)), (queries, (1, -1, 1)), (keys, (1, 1, -1)))]
    assert torch.equal(mask.mask_mod(index[0], torch.zeros(()), index[1], index[2]).expand_as(wanted), wanted)
    tiles = torch.zeros(batch, -(-queries // tile) * tile, -(-keys // tile) * tile, dtype=torch.bool)
    tiles[:, :queries, :keys] = wanted
    cells = tiles.unflatten(1, (-1, tile)).unflatten(3, (-1, tile)).transpose(2, 3).flatten(3)
    for b in range(batch):
        for row in range(cells.shape[1]):
            partial = set(mask.kv_indices[b, 0, row, : int(mask.kv_num_blocks[b, 0, row])].tolist())
            assert mask.full_kv_num_blocks is not None
            assert mask.full_kv_indices is not None
            full = set(mask.full_kv_indices[b, 0, row, : int(mask.full_kv_num_blocks[b, 0, row])].tolist())
            assert not partial & full
            assert set(cells[b, row].any(-1).nonzero().flatten().tolist()) <= partial | full
            assert all(bool(cells[b, row, column].all()) for column in full)


def test_few_tiles_are_looked_at_when_the_window_is_short() -> None:
    anchors = torch.arange(64).unsqueeze(0) * 60 + 100
    layout = BlockLayout(anchors, torch.ones_like(anchors, dtype=torch.bool), context_tokens=4096, block_size=16, groups=1)
    mask = flex.tile_mask(layout, Visibility(window=256, causal=True))
    assert mask.full_kv_num_blocks is not None
    looked_at = int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())
    assert looked_at <= 8 * (2 + 8)  # of 8 * 40


@pytest.mark.parametrize("blocks", [1, 3, 8, 9, 17, 100, 300, 512, 513])
def test_the_ladder_has_few_rungs_and_adds_at_most_a_quarter(blocks: int) -> None:
    anchors = torch.arange(blocks).unsqueeze(0)
    layout = BlockLayout(anchors, torch.ones_like(anchors, dtype=torch.bool), context_tokens=600, block_size=4, groups=1)
    rung = flex.on_ladder(layout)
    added = rung.anchors.shape[1] - blocks
    assert 0 <= added < max(8, blocks // 4 + 1)
    assert torch.equal(rung.anchors[:, :blocks], anchors)
    assert not bool(rung.keep[:, blocks:].any())
    rungs = {
        flex.on_ladder(layout._replace(anchors=anchors[:, :n], keep=layout.keep[:, :n])).anchors.shape[1] for n in range(1, blocks)
    }
    assert len(rungs) <= 4 * max(1, blocks.bit_length())


@settings(max_examples=6, deadline=None, derandomize=True)
@given(layout=layouts(most_blocks=5), kind=KINDS, seed=st.integers(0, 9))
def test_the_uncompiled_kernel_equals_the_query_by_query_reference(layout: BlockLayout, kind: Visibility, seed: int) -> None:
    """Forward only: flex attention has no backward on a CPU."""
    generator = torch.Generator().manual_seed(seed)
    batch, blocks = layout.anchors.shape
    make = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    queries = make(batch, blocks, layout.block_size, 4, 8)
    context = (make(batch, 2, layout.context_tokens, 8), make(batch, 2, layout.context_tokens, 8))
    block = (make(batch, blocks, layout.block_size, 2, 8), make(batch, blocks, layout.block_size, 2, 8))
    plan = flex.FlexAttention().plan(layout, visibility=kind, dtype=torch.float32)
    found = flex.attend_flex(flex_attention, queries, context, block, plan)
    wanted = naive.attention(queries, context, block, layout.anchors, kind.window, kind.causal)
    torch.testing.assert_close(found[layout.keep], wanted[layout.keep], atol=1e-5, rtol=1e-5)


def test_a_cpu_takes_lean_chunks_where_the_kernel_agrees_and_plain_ones_where_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choose_attention(drafter_config(), wanted="auto", device=CPU, dtype=torch.float32)
    assert (choice.backend.name, choice.reason) == ("lean", "forward and backward agree with chunked on cpu")
    monkeypatch.setattr(lean, "fold", None)
    choice = choose_attention(drafter_config(), wanted="auto", device=CPU, dtype=torch.float32)
    assert choice.backend.name == "chunked"
    assert "lean attention failed on cpu: TypeError" in choice.reason
    assert choose_attention(drafter_config(), wanted="chunked", device=CPU, dtype=torch.float32).backend.name == "chunked"
    with pytest.raises(DeviceError, match="no backward on a CPU"):
        choose_attention(drafter_config(), wanted="flex", device=CPU, dtype=torch.float32)


class _Wrong(ChunkedAttention):
    """Sees one token too many, as an off-by-one in a mask would."""

    name = "wrong"

    def plan(self, layout: BlockLayout, **more: object) -> object:  # type: ignore[override]
        return super().plan(layout._replace(anchors=layout.anchors + 1), **more)  # type: ignore[arg-type]


class _Broken(ChunkedAttention):
    name = "broken"

    def attend(self, *_: object) -> Tensor:
        raise NotImplementedError("no kernel for this device")


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (ChunkedAttention(), None),
        (_Wrong(), "wrong attention is off by"),
        (_Broken(), "NotImplementedError: no kernel for this device"),
    ],
    ids=["right", "wrong", "broken"],
)
def test_the_probe_tells_right_from_wrong_and_broken(backend: AttentionBackend, said: str | None) -> None:
    found = probe(backend, sliding_config(), device=CPU, dtype=torch.float32)
    assert (found is None) if said is None else (found is not None and said in found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: flex attention has no backward elsewhere")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_kernel_agrees_with_chunks_forward_and_backward(dtype: torch.dtype) -> None:
    config = sliding_config(head_dim=64, block_size=16, sliding_window=100)
    assert probe(flex.FlexAttention(), config, device=torch.device("cuda"), dtype=dtype) is None
