"""Chunked block attention with its own backward: the CPU's fast path.

Invariant: the same chunks, masks and results as `attend_blocks`; only what is kept for the backward differs.
Hard decision: autograd would keep every chunk's copy of the context's keys and values and turn each slice's gradient into a
tensor of the whole context (42 MB of copies at 2 x 2048 tokens and 64 anchors). Here a chunk keeps its output and log-sum-exp,
the copies are made again in the backward, and gradients are added in place. That needs torch's flash kernel for CPUs by its
internal name, so the backend is taken only where it exists and a probe agrees with the plain path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dflash.model.attention import AttentionChunk, BlockLayout, Visibility, covered_blocks, fold, of_rows, plan_chunks, unfold

Pair = tuple[Tensor, Tensor]
Plan = Sequence[AttentionChunk]


class LeanAttention:
    """Chunks on the flash kernel for CPUs, without copies kept."""

    name = "lean"

    def context_tokens(self, anchors: Tensor, *, available: int) -> int:
        """Nothing at or behind the last anchor is visible to any block."""
        return min(max(int(anchors.max()), 1), available)

    def plan(self, layout: BlockLayout, *, visibility: Visibility, dtype: torch.dtype) -> tuple[AttentionChunk, ...]:
        """Chunks with their masks."""
        return plan_chunks(layout, visibility=visibility, dtype=dtype)

    def attend(self, queries: Tensor, context: Pair, block: Pair, plan: Plan) -> Tensor:
        """Attention of all blocks.

        Args:
            queries: [B, N, K, H, Dh].
            context: keys and values, each [B, Hkv, S, Dh].
            block: keys and values, each [B, N, K, Hkv, Dh].
            plan: chunks of this batch and visibility.

        Returns:
            [B, N, K, H * Dh]; zeros for blocks that no chunk covers.
        """
        mixed: Tensor = _Chunks.apply(queries, *context, *block, plan)  # type: ignore[no-untyped-call]
        return mixed


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        own_keys: Tensor,
        own_values: Tensor,
        plan: Plan,
    ) -> Tensor:
        output = queries.new_zeros((*queries.shape[:3], queries.shape[3] * queries.shape[4]))
        totals = []
        for chunk in plan:
            rows = fold(of_rows(queries[:, covered_blocks(chunk)], chunk), keys.shape[1])
            seen, held = _copies((keys, own_keys), chunk), _copies((values, own_values), chunk)
            mixed, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(rows, seen, held, attn_mask=chunk.mask)  # noqa: SLF001
            totals.append(total)
            _put(output, unfold(mixed, queries.shape), chunk)
        ctx.save_for_backward(queries, keys, values, own_keys, own_values, output, *totals)
        ctx.plan = plan
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, own_keys, own_values, output, *totals = ctx.saved_tensors
        pulls = [torch.zeros_like(tensor) for tensor in (queries, keys, values, own_keys, own_values)]
        shape, key_heads = queries.shape, keys.shape[1]
        split = (*shape[:3], shape[3], shape[4])
        grad, output = grads[0].view(split), output.view(split)
        for chunk, total in zip(ctx.plan, totals, strict=True):
            blocks = covered_blocks(chunk)
            rows, mixed, pull = (fold(of_rows(tensor[:, blocks], chunk), key_heads) for tensor in (queries, output, grad))
            seen, held = _copies((keys, own_keys), chunk), _copies((values, own_values), chunk)
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(  # noqa: SLF001
                pull, rows, seen, held, mixed, total, 0.0, False, attn_mask=chunk.mask
            )
            _put(pulls[0], unfold(found[0], shape).view(len(found[0]), -1, *shape[2:]), chunk)
            _add(pulls[1], pulls[3], found[1], chunk)
            _add(pulls[2], pulls[4], found[2], chunk)
        return (*pulls, None)


def _copies(pair: Pair, chunk: AttentionChunk) -> Tensor:
    """Keys (or values) of the context that the chunk sees and of its own blocks, [R, Hkv, tokens + blocks * K, Dh]."""
    context, own = pair
    tokens = slice(chunk.first_token, chunk.last_token)
    blocks = of_rows(own[:, covered_blocks(chunk)], chunk).flatten(1, 2).transpose(1, 2)
    return torch.cat((of_rows(context[:, :, tokens], chunk), blocks), dim=2)


def _put(whole: Tensor, part: Tensor, chunk: AttentionChunk) -> None:
    """Write a chunk's blocks; every block belongs to one chunk."""
    if chunk.rows is None:
        whole[:, covered_blocks(chunk)] = part
    else:
        whole[chunk.rows, covered_blocks(chunk)] = part


def _add(context: Tensor, own: Tensor, pull: Tensor, chunk: AttentionChunk) -> None:
    """Add a chunk's gradient to the context's and write that of its own blocks."""
    tokens = chunk.last_token - chunk.first_token
    seen = context[:, :, chunk.first_token : chunk.last_token]
    if chunk.rows is None:
        seen.add_(pull[:, :, :tokens])
    else:
        seen.index_add_(0, chunk.rows, pull[:, :, :tokens])
    rows, key_heads, _, width = pull.shape
    blocks = pull[:, :, tokens:].transpose(1, 2).reshape(rows, chunk.last_block - chunk.first_block, -1, key_heads, width)
    _put(own, blocks, chunk)
