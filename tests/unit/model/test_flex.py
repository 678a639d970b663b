"""Flex attention's masks against the visibility rule pair by pair; the kernel itself where a device can run it."""

from __future__ import annotations

import model_naive as naive
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_fixtures import drafter_config, sliding_config
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash.errors import DeviceError
from dflash.model import backends, flex, lean
from dflash.model.attention import BlockLayout, Visibility
from dflash.model.backends import AttentionBackend, ChunkedAttention, choose_attention, probe
from dflash.model.drafter import Drafter
from tests.support.amount import amount

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


def _visible(layout: BlockLayout, flat: flex.FlatBlocks, kind: Visibility) -> Tensor:
    """Dense [T*K, C + T*K], from the sentences of the specification; blocks added by rounding up see themselves alone."""
    kept = [(b, int(layout.anchors[b, n])) for b, n in layout.keep.nonzero().tolist()]
    count, size = len(flat.anchor), layout.block_size
    seen = torch.zeros(count * size, flat.tokens + count * size, dtype=torch.bool)
    for number in range(count):
        b, anchor = kept[number] if number < len(kept) else (0, 0)
        for k in range(size):
            context, slots = naive.visible(anchor, k, window=kind.window, causal=kind.causal, block_size=size)
            seen[number * size + k, [b * layout.context_tokens + place for place in context]] = True
            seen[number * size + k, [flat.tokens + number * size + slot for slot in slots]] = True
    return seen


@settings(max_examples=60, deadline=None, derandomize=True)
@given(layout=layouts(), kind=KINDS, tile=st.sampled_from([4, 8, 16, 128]))
def test_tiles_and_mask_function_name_exactly_the_visible_pairs(layout: BlockLayout, kind: Visibility, tile: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "TILE", tile)
        rows, flat = flex.flatten(layout)
        mask = flex.tile_mask(flat, kind)
    assert (rows is None) == bool(layout.keep.all())
    wanted = _visible(layout, flat, kind)
    queries, keys = wanted.shape
    query, key = torch.arange(queries).view(-1, 1), torch.arange(keys).view(1, -1)
    assert torch.equal(mask.mask_mod(torch.zeros(()), torch.zeros(()), query, key).expand_as(wanted), wanted)
    tiles = torch.zeros(-(-queries // tile) * tile, -(-keys // tile) * tile, dtype=torch.bool)
    tiles[:queries, :keys] = wanted
    cells = tiles.unflatten(0, (-1, tile)).unflatten(2, (-1, tile)).transpose(1, 2).flatten(2)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    for row in range(cells.shape[0]):
        partial = set(mask.kv_indices[0, 0, row, : int(mask.kv_num_blocks[0, 0, row])].tolist())
        full = set(mask.full_kv_indices[0, 0, row, : int(mask.full_kv_num_blocks[0, 0, row])].tolist())
        assert not partial & full
        assert set(cells[row].any(-1).nonzero().flatten().tolist()) <= partial | full
        assert all(bool(cells[row, column].all()) for column in full)


def test_few_tiles_are_looked_at_when_the_window_is_short() -> None:
    anchors = torch.arange(64).expand(2, -1) * 60 + 100
    layout = BlockLayout(anchors, torch.ones_like(anchors, dtype=torch.bool), context_tokens=4096, block_size=16, groups=1)
    mask = flex.tile_mask(flex.flatten(layout)[1], Visibility(window=256, causal=True))
    assert mask.full_kv_num_blocks is not None
    looked_at = int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())
    assert looked_at <= 16 * (2 + 8)  # of 16 * 80


def test_blocks_that_were_added_or_dropped_look_at_no_context() -> None:
    keep = torch.tensor([[True, False, False], [True, True, False]])
    layout = BlockLayout(torch.full((2, 3), 700), keep, context_tokens=1000, block_size=128, groups=1)
    rows, flat = flex.flatten(layout)
    assert rows is not None
    assert rows.tolist() == [0, 3, 4]
    assert (flat.tokens, len(flat.anchor)) == (2048, 8)
    assert flat.first.tolist() == [0, 1000, 1000] + [1700] * 5
    mask = flex.tile_mask(flat, Visibility(window=None, causal=False))
    looked_at = mask.kv_num_blocks + mask.full_kv_num_blocks
    assert looked_at.flatten().tolist() == [6 + 1, 7 + 1, 7 + 1] + [2] * 5, "their own tile, and the one that their anchor cuts"


@pytest.mark.parametrize("blocks", [0, 1, 3, 8, 9, 17, 100, 300, 512, 513, 768])
def test_the_ladder_has_few_rungs_and_adds_at_most_half(blocks: int) -> None:
    rung = flex.rung(blocks)
    assert blocks <= rung <= max(8, 1.5 * blocks + 8)
    assert rung % 8 == 0
    assert len({flex.rung(n) for n in range(blocks + 1)}) <= 4 + 2 * max(1, blocks.bit_length() - 4)


@settings(max_examples=amount(3, full=6), deadline=None, derandomize=True)
@given(layout=layouts(most_blocks=5), kind=KINDS, seed=st.integers(0, 9))
def test_the_uncompiled_kernel_equals_the_query_by_query_reference(layout: BlockLayout, kind: Visibility, seed: int) -> None:
    """Forward only: flex attention has no backward on a CPU."""
    queries, context, block = _tensors(layout, seed=seed)
    plan = flex.FlexAttention().plan(layout, visibility=kind, dtype=torch.float32)
    assert isinstance(plan, flex.FlexPlan)
    found = flex.attend_flex(flex_attention, queries, context, block, plan)
    wanted = naive.attention(queries, context, block, layout.anchors, kind.window, kind.causal)
    torch.testing.assert_close(found[layout.keep], wanted[layout.keep], atol=1e-5, rtol=1e-5)
    assert not found[~layout.keep].any()


def _tensors(layout: BlockLayout, *, seed: int = 0) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    batch, blocks = layout.anchors.shape
    make = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    queries = make(batch, blocks, layout.block_size, 4, 8)
    # As the drafter has them: [B, S, Hkv, Dh], seen from the heads.
    context = tuple(make(batch, layout.context_tokens, 2, 8).transpose(1, 2) for _ in range(2))
    block = tuple(make(batch, blocks, layout.block_size, 2, 8) for _ in range(2))
    return queries, (context[0], context[1]), (block[0], block[1])


def _layout_of(batch: int, blocks: int, tokens: int) -> BlockLayout:
    anchors = torch.arange(1, blocks + 1).expand(batch, -1) % tokens
    keep = torch.ones_like(anchors, dtype=torch.bool)
    keep[-1, -1] = False
    return BlockLayout(anchors, keep, context_tokens=tokens, block_size=4, groups=2)


def test_the_kernel_is_compiled_for_each_shape_and_not_for_each_batch() -> None:
    compiled: list[object] = []

    def count(graph: torch.fx.GraphModule, _inputs: object) -> object:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    kernel = torch.compile(flex_attention, dynamic=False, fullgraph=True, backend=count)
    attention = flex.FlexAttention()
    # Lengths, sequences and anchors of all kinds: 100 to 250 tokens in all, 9 to 16 blocks; both visibilities.
    batches = [(1, 10, 130), (2, 6, 70), (3, 5, 80), (5, 3, 50), (2, 8, 120), (1, 14, 200)]
    for kind in (Visibility(window=None, causal=False), Visibility(window=20, causal=True)):
        for number, (batch, blocks, tokens) in enumerate(batches):
            layout = _layout_of(batch, blocks, tokens)
            queries, context, block = _tensors(layout, seed=number)
            plan = attention.plan(layout, visibility=kind, dtype=torch.float32)
            assert isinstance(plan, flex.FlexPlan)
            found = flex.attend_flex(kernel, queries, context, block, plan)
            chunks = ChunkedAttention().plan(layout, visibility=kind, dtype=torch.float32)
            wanted = ChunkedAttention().attend(queries, context, block, chunks)
            torch.testing.assert_close(found[layout.keep], wanted[layout.keep], atol=1e-5, rtol=1e-5)
    assert len(compiled) == 2


@pytest.mark.parametrize("lower", [False, True], ids=["float32", "autocast"])
def test_a_drafter_s_forward_is_the_same_with_either_backend(lower: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward only; with padded slots, two sequences, both kinds of layers, and queries, keys and values of one dtype."""
    calls: list[set[torch.dtype]] = []

    def kernel(*tensors: Tensor, **more: object) -> Tensor:
        calls.append({tensor.dtype for tensor in tensors})
        return flex_attention(*tensors, **more)  # type: ignore[arg-type, return-value]

    monkeypatch.setattr(flex, "compiled_kernel", lambda: kernel)
    config = sliding_config()
    drafter = Drafter(config, target_hidden_size=config.hidden_size)
    drafter.init_weights(0)
    dtype = torch.bfloat16 if lower else torch.float32
    features = torch.randn(2, 30, len(config.target_layer_ids) * config.hidden_size).to(dtype)
    anchors = torch.tensor([[3, 11, 29], [5, 17, 17]])
    keep = torch.tensor([[True, True, True], [True, True, False]])
    embeds = torch.randn(2, 3, config.block_size, config.hidden_size).to(dtype)
    found = []
    for backend in (flex.FlexAttention(), ChunkedAttention()):
        drafter.attention = backend
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=lower):
            found.append(drafter(features, embeds, anchors, keep))
    with torch.no_grad():
        exact = drafter(features.float(), embeds.float(), anchors, keep)
    off = [(each.float() - exact).abs().max() for each in found]
    # In bfloat16 either is a few roundings away from the exact values; neither may be much further than the other.
    assert off[0] <= (2 * off[1] if lower else 1e-5)
    assert not found[0][~keep].any()
    assert calls == [{dtype}] * config.num_hidden_layers


def _differentiable(
    queries: Tensor, keys: Tensor, values: Tensor, *, block_mask: BlockMask, enable_gqa: bool, kernel_options: dict[str, str]
) -> Tensor:
    """What the kernel computes, densely, so that gradients pass on a CPU, too."""
    assert kernel_options == {"BACKEND": "TRITON"}
    none, query, key = torch.zeros(()), torch.arange(queries.shape[2]).view(-1, 1), torch.arange(keys.shape[2]).view(1, -1)
    seen = block_mask.mask_mod(none, none, query, key)
    return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, enable_gqa=enable_gqa)


def test_gradients_pass_through_all_that_surrounds_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "compiled_kernel", lambda: _differentiable)
    monkeypatch.setattr(backends, "PROBE_TOLERANCE", {torch.float32: 1e-5})
    for config in (drafter_config(), sliding_config()):
        assert probe(flex.FlexAttention(), config, device=CPU, dtype=torch.float32) is None
    real = flex.flatten

    def shifted(layout: BlockLayout) -> tuple[Tensor | None, flex.FlatBlocks]:
        rows, flat = real(layout)
        return rows, flat._replace(anchor=flat.anchor + 1)

    monkeypatch.setattr(flex, "flatten", shifted)
    assert "off by" in str(probe(flex.FlexAttention(), sliding_config(), device=CPU, dtype=torch.float32))


def test_a_batch_of_one_shape_too_many_is_attended_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "SHAPES_LIMIT", 1)
    attention, kind = flex.FlexAttention(), Visibility(window=None, causal=False)
    plans = [attention.plan(_layout_of(1, blocks, 60), visibility=kind, dtype=torch.float32) for blocks in (5, 20, 6)]
    assert [isinstance(plan, flex.FlexPlan) for plan in plans] == [True, False, True]
    layout = _layout_of(1, 20, 60)
    found = attention.attend(*_tensors(layout), plans[1])
    wanted = naive.attention(*_tensors(layout), layout.anchors, None, causal=False)
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
