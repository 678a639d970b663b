"""Block attention by flex attention: one kernel that skips what no query of a tile sees.

Dimensions: B batch, S context tokens, N blocks a sequence, K block size, H query heads, Dh head width, T kept blocks of the batch.
The batch is one sequence here: keys are [all contexts, one after the other | kept blocks], C + T*K of them; queries are the T*K
block slots; a block sees positions from its own sequence's first to its anchor.
Invariant: `tile_mask` names every tile that holds a visible pair, and names a tile full only if all of its pairs are visible;
between the two the mask function decides pair by pair.
Hard decisions: the tiles come from the anchors by arithmetic on [T*K] vectors, because the library's own builder evaluates a
dense mask first (100 MB a sequence at 512 anchors, K 16 and 4096 tokens). The kernel is compiled once a static shape, so C is
rounded up to a power of two (what is added is never looked at) and T to a ladder of two rungs an octave: a plan with a hundred
padded lengths, batches of 1 to 16 sequences and any number of anchors has some dozens of shapes, where B, S and N make hundreds.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash.model.attention import AttentionChunk, BlockLayout, Visibility, attend_blocks, plan_chunks

logger = logging.getLogger(__name__)

TILE = 128
SHAPES_LIMIT = 128
"""Static shapes that are compiled; a batch of yet another one is attended in chunks."""
_ENTRIES_A_SHAPE = 4
"""With and without gradients, inside and outside autocast."""
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class FlexPlan(NamedTuple):
    """The mask of one visibility, and how a batch becomes one sequence.

    Attributes:
        rows: [T] kept slots of the flattened [B * N]; None if all are kept.
        blocks: T, rounded up; `tokens`: C.
    """

    mask: BlockMask
    rows: Tensor | None
    blocks: int
    tokens: int


class FlatBlocks(NamedTuple):
    """Kept blocks of a batch that has become one sequence; blocks added by rounding up see themselves alone.

    Attributes:
        first, anchor: [T] int32; each block sees positions first..anchor-1.
        tokens: C.
        block_size: K.
    """

    first: Tensor
    anchor: Tensor
    tokens: int
    block_size: int


class FlexAttention:
    """Flex attention, compiled."""

    name = "flex"

    def __init__(self) -> None:
        self._shapes: set[tuple[int, int, Visibility, torch.dtype]] = set()

    def context_tokens(self, anchors: Tensor, *, available: int) -> int:  # noqa: ARG002 - part of the backends' interface
        """All of it: tiles behind the last anchor cost nothing."""
        return available

    def plan(self, layout: BlockLayout, *, visibility: Visibility, dtype: torch.dtype) -> FlexPlan | tuple[AttentionChunk, ...]:
        """The tiles of one batch; chunks instead once too many shapes were compiled."""
        rows, flat = flatten(layout)
        shape = (flat.tokens, len(flat.anchor), visibility, dtype)
        if shape not in self._shapes:
            if len(self._shapes) >= SHAPES_LIMIT:
                logger.warning("flex attention has met %d shapes: %s is attended in chunks", SHAPES_LIMIT, shape[:2])
                return plan_chunks(layout, visibility=visibility, dtype=dtype)
            self._shapes.add(shape)
        return FlexPlan(tile_mask(flat, visibility), rows, len(flat.anchor), flat.tokens)

    def attend(
        self,
        queries: Tensor,
        context: tuple[Tensor, Tensor],
        block: tuple[Tensor, Tensor],
        plan: FlexPlan | tuple[AttentionChunk, ...],
    ) -> Tensor:
        """One call for all blocks."""
        if not isinstance(plan, FlexPlan):
            return attend_blocks(queries, context, block, plan)
        return attend_flex(compiled_kernel(), queries, context, block, plan)


@functools.cache
def compiled_kernel() -> Callable[..., Tensor]:
    """Flex attention, compiled for each static shape it meets; beyond dynamo's own limits a call would fail."""
    config, entries = torch._dynamo.config, _ENTRIES_A_SHAPE * SHAPES_LIMIT  # noqa: SLF001
    config.recompile_limit = max(config.recompile_limit, entries)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, entries)
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
        [B, N, K, H * Dh]; zeros for blocks that are not kept.
    """
    batch, blocks, block_size, heads, width = queries.shape
    rows = _as_heads(_slots(queries, plan))
    keys, values = (_as_heads(_keys(seen, own, plan)) for seen, own in zip(context, block, strict=True))
    mixed = kernel(
        rows, keys, values, block_mask=plan.mask, enable_gqa=heads != keys.shape[1], kernel_options={"BACKEND": "TRITON"}
    )
    kept = mixed.transpose(1, 2).reshape(plan.blocks, block_size, heads * width)
    if plan.rows is None:
        return kept[: batch * blocks].reshape(batch, blocks, *kept.shape[1:])
    spread = kept.new_zeros((batch * blocks, *kept.shape[1:])).index_copy(0, plan.rows, kept[: len(plan.rows)])
    return spread.reshape(batch, blocks, *kept.shape[1:])


def _slots(values: Tensor, plan: FlexPlan) -> Tensor:
    """[B, N, K, H, Dh] -> [blocks * K, H, Dh], zeros in the added blocks."""
    flat = values.flatten(0, 1)
    kept = flat if plan.rows is None else flat.index_select(0, plan.rows)
    return _padded(kept.flatten(0, 1), plan.blocks * values.shape[2])


def _keys(seen: Tensor, own: Tensor, plan: FlexPlan) -> Tensor:
    """Context [B, Hkv, S, Dh] and blocks [B, N, K, Hkv, Dh] -> [C + blocks * K, Hkv, Dh]."""
    return torch.cat((_padded(seen.transpose(1, 2).flatten(0, 1), plan.tokens), _slots(own, plan).to(seen.dtype)))


def _padded(rows: Tensor, count: int) -> Tensor:
    return rows if len(rows) == count else torch.cat((rows, rows.new_zeros((count - len(rows), *rows.shape[1:]))))


def _as_heads(rows: Tensor) -> Tensor:
    """[n, H, Dh] -> [1, H, n, Dh]."""
    return rows.unsqueeze(0).transpose(1, 2)


def flatten(layout: BlockLayout) -> tuple[Tensor | None, FlatBlocks]:
    """The kept slots of [B * N] (None if all), and their blocks in a batch that is one sequence, rounded up."""
    batch, blocks = layout.anchors.shape
    rows = layout.keep.flatten().nonzero().squeeze(1)
    first = (rows // blocks) * layout.context_tokens
    anchor = first + layout.anchors.flatten().index_select(0, rows)
    added = rung(len(rows)) - len(rows)
    if added:  # they stand where the last one does, so that their tile looks at no more context
        last = anchor[-1:] if len(rows) else anchor.new_zeros(1)
        first, anchor = torch.cat((first, last.expand(added))), torch.cat((anchor, last.expand(added)))
    tokens = max(TILE, 1 << (batch * layout.context_tokens - 1).bit_length())
    flat = FlatBlocks(first.to(torch.int32), anchor.to(torch.int32), tokens, layout.block_size)
    return (None if len(rows) == batch * blocks else rows), flat


def rung(blocks: int) -> int:
    """The count of blocks rounded up: multiples of 8, two an octave above 32."""
    step = max(8, (1 << max(0, blocks - 1).bit_length()) // 4)
    return max(1, -(-blocks // step)) * step


def mask_function(flat: FlatBlocks, visibility: Visibility) -> MaskFunction:
    """Whether a query sees a key, from indices into the slots and into [context | blocks]."""
    first, anchor, tokens, block_size = flat
    window, causal, last = visibility.window, visibility.causal, len(anchor) - 1

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001 - all heads are alike
        block, slot = query // block_size, query % block_size
        block = block.clamp(max=last)  # kernels ask about rows behind the last one, too
        context = (key >= first[block]) & (key < anchor[block])
        if window is not None:
            context = context & (key >= anchor[block] + slot - (window - 1))
        own = (key - tokens) // block_size == block
        if causal:
            own = own & ((key - tokens) % block_size <= slot)
        return torch.where(key < tokens, context, own)

    return visible


def tile_mask(flat: FlatBlocks, visibility: Visibility) -> BlockMask:
    """The tiles that hold visible pairs, with the mask function for those that are not full."""
    partial, full = _tiles(flat, visibility)
    counts = [tiles.sum(-1, dtype=torch.int32) for tiles in (partial, full)]
    # Wanted tiles first, in order; what stands behind the count is never read.
    orders = [(~tiles).to(torch.int8).argsort(dim=-1, stable=True).to(torch.int32) for tiles in (partial, full)]
    queries = len(flat.anchor) * flat.block_size
    return BlockMask.from_kv_blocks(
        counts[0],
        orders[0],
        counts[1],
        orders[1],
        BLOCK_SIZE=TILE,
        mask_mod=mask_function(flat, visibility),
        seq_lengths=(queries, flat.tokens + queries),
    )


def _tiles(flat: FlatBlocks, visibility: Visibility) -> tuple[Tensor, Tensor]:
    """Partial and full tiles, each bool [1, 1, query tiles, key tiles]."""
    tokens, block_size = flat.tokens, flat.block_size
    device, queries = flat.anchor.device, len(flat.anchor) * block_size
    query_tiles, key_tiles = -(-queries // TILE), -(-(tokens + queries) // TILE)
    # Context that each query sees: positions low..high-1. Rows behind the last query repeat it.
    row = torch.arange(query_tiles * TILE, device=device).clamp(max=queries - 1)
    low, high = flat.first[row // block_size], flat.anchor[row // block_size]
    if visibility.window is not None:
        low = torch.maximum(low, high + row % block_size - (visibility.window - 1))
    low, high = (bound.reshape(query_tiles, 1, TILE) for bound in (low, high))
    first = torch.arange(key_tiles, device=device) * TILE
    end = first + TILE
    context = (first < high.amax(-1)) & (end > low.amin(-1))
    full = (end <= high.amin(-1)) & (first >= low.amax(-1))
    # Its own block: the tile's first to last block, as keys behind the context.
    block = row.reshape(query_tiles, TILE) // block_size
    own = (end > tokens + block[:, :1] * block_size) & (first < tokens + (block[:, -1:] + 1) * block_size)
    partial = (context | own) & ~full
    return partial[None, None], full[None, None]
