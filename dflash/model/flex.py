"""Block attention by flex attention: one kernel that skips what no query of a tile sees.

Dimensions: B batch, S context tokens, N blocks a sequence (a rung of the ladder), K block size, H query heads, Dh head width.
Keys are [context | blocks] in one sequence of S + N*K; queries are the N*K block slots.
Invariant: `tile_mask` names every tile that holds a visible pair, and names a tile full only if all of its pairs are visible;
between the two the mask function decides pair by pair.
Hard decisions: the tiles come from the anchors by arithmetic on [N*K] vectors, because the library's own builder evaluates a
dense [N*K, S + N*K] mask first (100 MB a sequence at 512 anchors, K 16 and 4096 tokens). The kernel is compiled once a static
shape, so the context stays at the batch's padded length and N is rounded up to a ladder of at most four rungs an octave.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash.model.attention import BlockLayout, Visibility

TILE = 128
SHAPES_LIMIT = 256
"""Static shapes that may be compiled: padded lengths times rungs of N."""
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class FlexPlan(NamedTuple):
    """The mask of one visibility and the number of blocks that it was made for."""

    mask: BlockMask
    blocks: int


class FlexAttention:
    """Flex attention, compiled."""

    name = "flex"

    def context_tokens(self, anchors: Tensor, *, available: int) -> int:  # noqa: ARG002 - part of the backends' interface
        """All of it: a shape that followed the last anchor would be compiled for every batch."""
        return available

    def plan(self, layout: BlockLayout, *, visibility: Visibility, dtype: torch.dtype) -> FlexPlan:  # noqa: ARG002
        """The tiles of one batch."""
        layout = on_ladder(layout)
        return FlexPlan(tile_mask(layout, visibility), layout.anchors.shape[1])

    def attend(self, queries: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], plan: FlexPlan) -> Tensor:
        """One call for all blocks."""
        return attend_flex(compiled_kernel(), queries, context, block, plan)


@functools.cache
def compiled_kernel() -> Callable[..., Tensor]:
    """Flex attention, compiled for each static shape it meets; beyond the limit it would fall back to a dense computation."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES_LIMIT)  # noqa: SLF001
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return compiled


def attend_flex(
    kernel: Callable[..., Tensor], queries: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], plan: FlexPlan
) -> Tensor:
    """Attention of all blocks in one call.

    Args:
        kernel: flex attention.
        queries: [B, N, K, H, Dh].
        context: keys and values, each [B, Hkv, S, Dh].
        block: keys and values, each [B, N, K, Hkv, Dh].
        plan: of this batch and visibility.

    Returns:
        [B, N, K, H * Dh]; padded slots hold attention to themselves.
    """
    batch, blocks, block_size, heads, width = queries.shape
    rows = _as_sequence(queries, plan.blocks)
    keys, values = (
        torch.cat((seen, _as_sequence(own, plan.blocks).to(seen.dtype)), dim=2) for seen, own in zip(context, block, strict=True)
    )
    mixed = kernel(rows, keys, values, block_mask=plan.mask, enable_gqa=heads != keys.shape[1])
    unfolded = mixed.transpose(1, 2).reshape(batch, plan.blocks, block_size, heads * width)
    return unfolded[:, :blocks]


def _as_sequence(slots: Tensor, blocks: int) -> Tensor:
    """[B, N, K, H, Dh] -> [B, H, blocks * K, Dh], zeros in the added blocks."""
    missing = blocks - slots.shape[1]
    if missing:
        slots = torch.cat((slots, slots.new_zeros((len(slots), missing, *slots.shape[2:]))), dim=1)
    return slots.flatten(1, 2).transpose(1, 2).contiguous()


def on_ladder(layout: BlockLayout) -> BlockLayout:
    """The layout with N rounded up to its rung; every padded slot stands at anchor 0, where it sees itself alone."""
    blocks = layout.anchors.shape[1]
    step = max(8, (1 << (blocks - 1).bit_length()) // 8)
    missing = -(-blocks // step) * step - blocks
    keep = torch.nn.functional.pad(layout.keep, (0, missing))
    anchors = torch.nn.functional.pad(layout.anchors, (0, missing)).masked_fill(~keep, 0)
    return layout._replace(anchors=anchors, keep=keep)


def mask_function(layout: BlockLayout, visibility: Visibility) -> MaskFunction:
    """Whether a query sees a key, from indices into the slots and into [context | blocks]."""
    anchors, tokens, block_size, window = layout.anchors, layout.context_tokens, layout.block_size, visibility.window
    last = anchors.shape[1] - 1

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001 - all heads are alike
        block, slot = query // block_size, query % block_size
        anchor = anchors[batch, block.clamp(max=last)]  # kernels ask about rows behind the last one, too
        context = key < anchor
        if window is not None:
            context = context & (key >= anchor + slot - (window - 1))
        own = (key - tokens) // block_size == block
        if visibility.causal:
            own = own & ((key - tokens) % block_size <= slot)
        return torch.where(key < tokens, context, own)

    return visible


def tile_mask(layout: BlockLayout, visibility: Visibility) -> BlockMask:
    """The tiles that hold visible pairs, with the mask function for those that are not full."""
    partial, full = _tiles(layout, visibility)
    counts = [tiles.sum(-1, dtype=torch.int32) for tiles in (partial, full)]
    # Wanted tiles first, in order; what stands behind the count is never read.
    orders = [(~tiles).to(torch.int8).argsort(dim=-1, stable=True).to(torch.int32) for tiles in (partial, full)]
    queries = layout.anchors.shape[1] * layout.block_size
    return BlockMask.from_kv_blocks(
        counts[0],
        orders[0],
        counts[1],
        orders[1],
        BLOCK_SIZE=TILE,
        mask_mod=mask_function(layout, visibility),
        seq_lengths=(queries, layout.context_tokens + queries),
    )


def _tiles(layout: BlockLayout, visibility: Visibility) -> tuple[Tensor, Tensor]:
    """Partial and full tiles, each bool [B, 1, query tiles, key tiles]."""
    anchors, tokens, block_size = layout.anchors, layout.context_tokens, layout.block_size
    device, queries = anchors.device, anchors.shape[1] * block_size
    query_tiles, key_tiles = -(-queries // TILE), -(-(tokens + queries) // TILE)
    # Context that each query sees: positions low..high-1. Rows behind the last query repeat it.
    row = torch.arange(query_tiles * TILE, device=device).clamp(max=queries - 1)
    high = anchors[:, row // block_size]
    low = torch.zeros_like(high) if visibility.window is None else (high + row % block_size - (visibility.window - 1)).clamp(min=0)
    low, high = (bound.reshape(-1, query_tiles, 1, TILE) for bound in (low, high))
    first = torch.arange(key_tiles, device=device) * TILE
    end = first + TILE
    lowest, highest = low.amin(-1), high.amax(-1)
    context = (first < highest.clamp(max=tokens)) & (end > lowest)
    full = (end <= tokens) & (end <= high.amin(-1)) & (first >= low.amax(-1))
    # Its own block: the tile's first to last block, as keys behind the context.
    block = row.reshape(query_tiles, TILE) // block_size
    own = (end > tokens + block[:, :1] * block_size) & (first < tokens + (block[:, -1:] + 1) * block_size)
    partial = (context | own) & ~full
    return partial.unsqueeze(1), full.unsqueeze(1)
