"""The drafter: a small Qwen3-style pre-norm decoder that fills a block of masked tokens in one pass.

Dimensions: B batch, S context tokens, N blocks a sequence, K block size, D width, M tapped layers, T kept blocks of the batch.
Invariant: the names of the module's state are the published checkpoint names (11 tensors a layer and 3 more).
The context C = hidden_norm(fc(taps)) is computed once, never updated, and every layer projects the same C with the same
k_proj / v_proj as its block; embedding and head are the target's and frozen, so they are no part of this module.
Hard decision: everything but attention runs on the T kept blocks only, so that padded anchor slots cost nothing there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dflash.config import DrafterConfig
from dflash.errors import DrafterError
from dflash.model.attention import BlockLayout, Visibility, attend_one_block
from dflash.model.backends import AttentionBackend, ChunkedAttention
from dflash.model.context_cache import ContextCache
from dflash.model.norm import rms_norm
from dflash.model.rope import rotary_angles, rotate
from dflash.model.swiglu import swiglu_down

Rotary = tuple[Tensor, Tensor]


class Kept(NamedTuple):
    """Which anchor slots hold a block; `rows` is None when all do."""

    batch: int
    blocks: int
    rows: Tensor | None

    @classmethod
    def of(cls, keep: Tensor) -> Kept:
        """From the flags [B, N]."""
        rows = keep.reshape(-1).nonzero().squeeze(1)
        return cls(keep.shape[0], keep.shape[1], None if len(rows) == keep.numel() else rows)

    def take(self, slots: Tensor) -> Tensor:
        """[B, N, ...] -> [T, ...]."""
        flat = slots.reshape(-1, *slots.shape[2:])
        return flat if self.rows is None else flat.index_select(0, self.rows)

    def spread(self, kept: Tensor) -> Tensor:
        """[T, ...] -> [B, N, ...], zeros in the padded slots."""
        if self.rows is not None:
            kept = kept.new_zeros((self.batch * self.blocks, *kept.shape[1:])).index_copy(0, self.rows, kept)
        return kept.reshape(self.batch, self.blocks, *kept.shape[1:])


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight, over the last dimension."""

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalise the last dimension, in the input's dtype."""
        return rms_norm(inputs, self.weight, eps=self.eps)


class DrafterAttention(nn.Module):
    """Projections of one layer; the queries come from the block only."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width, head_dim = config.hidden_size, config.head_dim
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, width, bias=False)
        self.q_norm = RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, eps=config.rms_norm_eps)

    def queries(self, hidden: Tensor, rotary: Rotary) -> Tensor:
        """[..., D] -> [..., H, Dh], normalised and rotated."""
        return rotate(self.q_norm(self.q_proj(hidden).unflatten(-1, (-1, self.head_dim))), *rotary)

    def keys_values(self, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """[..., D] -> keys (normalised, rotated) and values, each [..., Hkv, Dh]."""
        keys = rotate(self.k_norm(self.k_proj(hidden).unflatten(-1, (-1, self.head_dim))), *rotary)
        return keys, self.v_proj(hidden).unflatten(-1, (-1, self.head_dim))


class DrafterMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return swiglu_down(self.gate_proj(hidden), self.up_proj(hidden), self.down_proj.weight)


class _Attend(NamedTuple):
    """The backend and its plan for one batch and one visibility."""

    backend: AttentionBackend
    plan: Any


class DrafterLayer(nn.Module):
    """One pre-norm layer."""

    def __init__(self, config: DrafterConfig, *, visibility: Visibility) -> None:
        super().__init__()
        self.visibility = visibility
        self.self_attn = DrafterAttention(config)
        self.mlp = DrafterMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: Tensor, context: Tensor, *, rotary: tuple[Rotary, Rotary], kept: Kept, attend: _Attend) -> Tensor:
        """Training: hidden [T, K, D], context [B, S, D], rotary of context and of blocks -> [T, K, D]."""
        seen, own, queries = self.project(hidden, context, *rotary)
        mixed = attend.backend.attend(
            kept.spread(queries),
            (seen[0].transpose(1, 2), seen[1].transpose(1, 2)),
            (kept.spread(own[0]), kept.spread(own[1])),
            attend.plan,
        )
        return self.finish(hidden, kept.take(mixed))

    def project(
        self, hidden: Tensor, context: Tensor, context_rotary: Rotary, rotary: Rotary
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
        """In front of attention: keys and values of the context [B, S, Hkv, Dh] and of the blocks [T, K, Hkv, Dh], and queries."""
        normed, attention = self.input_layernorm(hidden), self.self_attn
        return (
            attention.keys_values(context, context_rotary),
            attention.keys_values(normed, rotary),
            attention.queries(normed, rotary),
        )

    def draft(self, hidden: Tensor, seen: tuple[Tensor, Tensor], *, rotary: Rotary) -> Tensor:
        """Decoding: hidden [B, K, D] and the projected context -> [B, K, D]."""
        normed = self.input_layernorm(hidden)
        own = self.self_attn.keys_values(normed, rotary)
        mixed = attend_one_block(self.self_attn.queries(normed, rotary), seen, own, visibility=self.visibility)
        return self.finish(hidden, mixed)

    def finish(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """Behind attention: both residual additions, from what it mixed [..., H * Dh]."""
        hidden = hidden + self.self_attn.o_proj(mixed)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Drafter(nn.Module):
    """The block drafter, in the published layout.

    Args:
        config: shape; `target_layer_ids` fixes M.
        target_hidden_size: width of one tapped target layer.
    """

    def __init__(self, config: DrafterConfig, *, target_hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.target_hidden_size = target_hidden_size
        self.attention: AttentionBackend = ChunkedAttention()  # works everywhere; a trainer sets what its probe chose
        self.recompute_layers = False  # a trainer sets it to trade time for the layers' saved activations
        self.fc = nn.Linear(len(config.target_layer_ids) * target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        full = Visibility(window=None, causal=False)
        sliding = Visibility(window=config.sliding_window, causal=config.sliding_causal)
        self.layers = nn.ModuleList(
            DrafterLayer(config, visibility=sliding if kind == "sliding_attention" else full)
            for kind in config.resolved_layer_types
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set linear weights to N(0, initializer_range) and norms to one; the same values on every device."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                values = torch.empty(parameter.shape, dtype=torch.float32).normal_(generator=generator)
                parameter.copy_(values * self.config.initializer_range)

    def forward(self, features: Tensor, block_embeds: Tensor, anchors: Tensor, keep: Tensor) -> Tensor:
        """Hidden states of all blocks, after the final norm.

        Args:
            features: [B, S, M*D], target taps.
            block_embeds: [B, N, K, D], target embedding of `[x_a, MASK, ...]`.
            anchors: [B, N] positions, best sorted.
            keep: [B, N] flags of real blocks.

        Returns:
            [B, N, K, D]; zeros where keep is false.
        """
        kept = Kept.of(keep)
        context_tokens = self.attention.context_tokens(anchors, available=features.shape[1])
        context = self._context(features[:, :context_tokens])
        device = features.device
        slots = kept.take(anchors).unsqueeze(1) + torch.arange(block_embeds.shape[2], device=device)
        rotary = (self._rotary(torch.arange(context_tokens, device=device), context.dtype), self._rotary(slots, context.dtype))
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        plans = self._plans(BlockLayout(anchors, keep, context_tokens, block_embeds.shape[2], groups), context.dtype)
        hidden = kept.take(block_embeds)
        for layer in self._typed_layers():
            run = partial(layer, rotary=rotary, kept=kept, attend=plans[layer.visibility])
            if self.recompute_layers and torch.is_grad_enabled():
                hidden = checkpoint(run, hidden, context, use_reentrant=False)
            else:
                hidden = run(hidden, context)
        return kept.spread(self.norm(hidden))

    def compile_dense(self, *, backend: str) -> None:
        """Compile what stands between attentions, once for any number of blocks and tokens.

        Not the whole forward: kept blocks and chunks are counted in it, so every batch would be traced anew.
        """
        for layer in self._typed_layers():
            for name in ("project", "finish"):
                setattr(layer, name, torch.compile(getattr(layer, name), dynamic=True, backend=backend))

    def new_cache(self) -> ContextCache:
        """An empty cache of projected context for `draft`."""
        return ContextCache(len(self.layers))

    @torch.no_grad()
    def draft(self, block_embeds: Tensor, new_features: Tensor, cache: ContextCache, start: int) -> Tensor:
        """Hidden states of one block a sequence while decoding; the block's own keys and values are not kept.

        Args:
            block_embeds: [B, K, D] with K at most the trained block size, embedding of `[x_start, MASK, ...]`.
            new_features: [B, n, M*D], taps of the positions from the cache's length up to start-1.
            cache: projected context; extended by the n new positions.
            start: the anchor's position.

        Returns:
            [B, K, D] after the final norm.

        Raises:
            DrafterError: the cached and the new positions are not exactly 0..start-1.
        """
        if cache.length_tokens + new_features.shape[1] != start:
            raise DrafterError(
                f"{cache.length_tokens} cached and {new_features.shape[1]} new positions do not end right before anchor {start}",
                remedy="give draft() the features of every committed position exactly once",
            )
        context = self._context(new_features)
        device = context.device
        seen_rotary = self._rotary(torch.arange(cache.length_tokens, start, device=device), context.dtype)
        rotary = self._rotary(torch.arange(start, start + block_embeds.shape[1], device=device), context.dtype)
        hidden = block_embeds
        for index, layer in enumerate(self._typed_layers()):
            keys, values = layer.self_attn.keys_values(context, seen_rotary)
            seen = cache.append(index, keys.transpose(1, 2), values.transpose(1, 2))
            hidden = layer.draft(hidden, seen, rotary=rotary)
        output: Tensor = self.norm(hidden)
        return output

    def _context(self, features: Tensor) -> Tensor:
        output: Tensor = self.hidden_norm(self.fc(features))
        return output

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        cos, sin = rotary_angles(positions, head_dim=self.config.head_dim, theta=self.config.rope_theta, dtype=dtype)
        return cos.unsqueeze(-2), sin.unsqueeze(-2)

    def _plans(self, layout: BlockLayout, dtype: torch.dtype) -> dict[Visibility, _Attend]:
        """One plan for each kind of layer, shared by all layers of that kind."""
        kinds = {layer.visibility for layer in self._typed_layers()}
        return {kind: _Attend(self.attention, self.attention.plan(layout, visibility=kind, dtype=dtype)) for kind in kinds}

    def _typed_layers(self) -> Iterator[DrafterLayer]:
        return (cast("DrafterLayer", layer) for layer in self.layers)
