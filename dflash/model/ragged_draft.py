"""Drafting a block for several rows whose contexts differ in length.

Dimensions: B rows, n new positions, K block size, T longest context, M*D width of the taps, Hkv key heads, Dh head width.
Invariant: a row drafts what `Drafter.draft` drafts for it alone. Every row's projected context starts at column 0 of the buffers;
new positions are written at the row's own end, and what a shorter row writes behind its committed positions is masked now
and overwritten by its next positions. So nothing is ever cropped, moved or gathered; a new row takes the place of one that has
ended, and its prompt is projected alone: beside the others' few new positions it would pad them to its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dflash.model.drafter import Drafter
from dflash.model.rope import rotary_angles, rotate

FIRST_CAPACITY_TOKENS = 64

Rotary = tuple[Tensor, Tensor]


class RaggedContext:
    """Projected keys and values [B, capacity, Hkv, Dh] of each drafter layer, and each row's length.

    Args:
        rows: B.
    """

    def __init__(self, rows: int) -> None:
        self.lengths = [0] * rows
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Put new positions [B, n, Hkv, Dh] behind every row's end, without moving the ends."""
        buffers = self._grown(layer, keys, max(self.lengths) + keys.shape[1])
        rows = torch.arange(len(self.lengths), device=keys.device)[:, None]
        ends = torch.tensor(self.lengths, device=keys.device)[:, None]
        columns = ends + torch.arange(keys.shape[1], device=keys.device)
        buffers[0][rows, columns] = keys
        buffers[1][rows, columns] = values

    def read(self, layer: int, tokens: int) -> tuple[Tensor, Tensor]:
        """The first `tokens` columns of a layer's keys and values, each [B, tokens, Hkv, Dh]."""
        keys, values = self._buffers[layer]
        return keys[:, :tokens], values[:, :tokens]

    def refill(self, row: int, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Let a new row take the place of one: keys and values [1, n, Hkv, Dh] of each layer, which are all that it has."""
        self.lengths[row] = layers[0][0].shape[1]
        for layer, (keys, values) in enumerate(layers):
            buffers = self._grown(layer, keys, keys.shape[1])
            for buffer, new in zip(buffers, (keys, values), strict=True):
                buffer[row, : new.shape[1]] = new[0]
                buffer[row, new.shape[1] :] = 0

    def select_rows(self, rows: Sequence[int]) -> None:
        """Only these rows, in this order."""
        self.lengths = [self.lengths[row] for row in rows]
        for layer, (keys, values) in self._buffers.items():
            index = torch.tensor(list(rows), device=keys.device)
            self._buffers[layer] = (keys.index_select(0, index), values.index_select(0, index))

    def _grown(self, layer: int, like: Tensor, end: int) -> tuple[Tensor, Tensor]:
        old = self._buffers.get(layer)
        if old is not None and old[0].shape[1] >= end:
            return old
        capacity = FIRST_CAPACITY_TOKENS
        while capacity < end:
            capacity *= 2
        # Zeros, not whatever memory held: a masked column still takes part in the product with its weight of zero.
        pair = like.new_zeros(2, len(self.lengths), capacity, *like.shape[2:])
        if old is not None:
            held = old[0].shape[1]
            pair[0, :, :held], pair[1, :, :held] = old
        self._buffers[layer] = (pair[0], pair[1])
        return pair[0], pair[1]


@torch.no_grad()
def refill_ragged(drafter: Drafter, features: Tensor, context: RaggedContext, *, row: int) -> None:
    """Let a new prompt take a row's place.

    Args:
        drafter: in eval mode.
        features: [1, n, M*D], taps of its n tokens.
        context: projected context of B rows.
        row: whose place it takes.
    """
    projected = drafter.hidden_norm(drafter.fc(features))
    rotary = _rotary(drafter, torch.arange(features.shape[1], device=features.device), projected.dtype)
    layers: list[Any] = list(drafter.layers)
    context.refill(row, [_keys_values(layer.self_attn, projected, rotary, drafter.config.head_dim) for layer in layers])


@torch.no_grad()
def draft_ragged(
    drafter: Drafter, block_embeds: Tensor, new_features: Tensor, context: RaggedContext, kept: Sequence[int]
) -> Tensor:
    """Hidden states of one block a row; the blocks' own keys and values are not kept.

    Args:
        drafter: in eval mode.
        block_embeds: [B, K, D], embedding of `[x_start, MASK, ...]`.
        new_features: [B, n, M*D], taps behind each row's context.
        context: projected context; row r grows by kept[r].
        kept: how many of the n positions of each row are committed, 0 where its context is complete; its block starts right
            behind them.

    Returns:
        [B, K, D] after the final norm.
    """
    config = drafter.config
    device, block = block_embeds.device, block_embeds.shape[1]
    ends = torch.tensor(context.lengths, device=device)[:, None]
    starts = ends + torch.tensor(list(kept), device=device)[:, None]
    projected = drafter.hidden_norm(drafter.fc(new_features))
    seen_rotary = _rotary(drafter, ends + torch.arange(new_features.shape[1], device=device), projected.dtype)
    rotary = _rotary(drafter, starts + torch.arange(block, device=device), projected.dtype)
    lengths = [length + count for length, count in zip(context.lengths, kept, strict=True)]
    masks: dict[str, Tensor | None] = {}
    hidden = block_embeds
    layers: list[Any] = list(drafter.layers)
    for index, (layer, kind) in enumerate(zip(layers, config.resolved_layer_types, strict=True)):
        context.write(index, *_keys_values(layer.self_attn, projected, seen_rotary, config.head_dim))
        if kind not in masks:
            masks[kind] = _mask(drafter, kind, starts, lengths, block)
        normed = layer.input_layernorm(hidden)
        own = _keys_values(layer.self_attn, normed, rotary, config.head_dim)
        seen = context.read(index, max(lengths))
        mixed = _attend(
            rotate(layer.self_attn.q_norm(layer.self_attn.q_proj(normed).unflatten(-1, (-1, config.head_dim))), *rotary),
            torch.cat((seen[0], own[0]), dim=1),
            torch.cat((seen[1], own[1]), dim=1),
            masks[kind],
        )
        hidden = hidden + layer.self_attn.o_proj(mixed)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    context.lengths = lengths
    output: Tensor = drafter.norm(hidden)
    return output


def _keys_values(attention: Any, hidden: Tensor, rotary: Rotary, head_dim: int) -> tuple[Tensor, Tensor]:
    keys = attention.k_norm(attention.k_proj(hidden).unflatten(-1, (-1, head_dim)))
    return rotate(keys, *rotary), attention.v_proj(hidden).unflatten(-1, (-1, head_dim))


def _rotary(drafter: Drafter, positions: Tensor, dtype: torch.dtype) -> Rotary:
    cos, sin = rotary_angles(positions, head_dim=drafter.config.head_dim, theta=drafter.config.rope_theta, dtype=dtype)
    return cos.unsqueeze(-2), sin.unsqueeze(-2)


def _mask(drafter: Drafter, kind: str, starts: Tensor, lengths: Sequence[int], block: int) -> Tensor | None:
    """What each slot sees, [B, K, T + K]; None where everything is seen."""
    sliding = kind == "sliding_attention"
    longest = max(lengths)
    if not sliding and min(lengths) == longest:
        return None
    column = torch.arange(longest, device=starts.device)
    slot = torch.arange(block, device=starts.device)
    context = (column < starts[:, None]).expand(-1, block, -1)
    own = torch.ones(block, block, dtype=torch.bool, device=starts.device)
    if sliding and drafter.config.sliding_window is not None:
        context = context & (column >= starts[:, None] + slot[:, None] - (drafter.config.sliding_window - 1))
        own = slot[None, :] <= slot[:, None] if drafter.config.sliding_causal else own
    return torch.cat((context, own.expand(len(lengths), -1, -1)), dim=-1)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Queries [B, K, H, Dh] over keys and values [B, T, Hkv, Dh], the heads of a group folded into rows -> [B, K, H*Dh]."""
    batch, block, heads, width = queries.shape
    groups = heads // keys.shape[2]
    rows = queries.reshape(batch, block, -1, groups, width).permute(0, 2, 3, 1, 4).flatten(2, 3)
    folded = None if mask is None else mask.repeat(1, groups, 1).unsqueeze(1)
    mixed = functional.scaled_dot_product_attention(rows, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=folded)
    return mixed.reshape(batch, -1, groups, block, width).permute(0, 3, 1, 2, 4).reshape(batch, block, heads * width)
