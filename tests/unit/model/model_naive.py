"""The specification written out slowly: one query at a time, full logits, no chunks. The truth of the model room's tests."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from dflash.config import DrafterConfig


def visible(anchor: int, slot: int, *, window: int | None, causal: bool, block_size: int) -> tuple[list[int], list[int]]:
    """Context positions and block slots that one query sees, straight from the specification's sentences."""
    context = [j for j in range(anchor) if window is None or j >= anchor + slot - (window - 1)]
    slots = [other for other in range(block_size) if not causal or other <= slot]
    return context, slots


def attention(
    queries: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], anchors: Tensor, window: int | None, causal: bool
) -> Tensor:
    """[B, N, K, H, Dh] queries -> [B, N, K, H * Dh]; context [B, Hkv, S, Dh], block [B, N, K, Hkv, Dh]."""
    batch, blocks, block_size, heads, width = queries.shape
    groups = heads // context[0].shape[1]
    rows = []
    for b in range(batch):
        for n in range(blocks):
            for k in range(block_size):
                seen, slots = visible(int(anchors[b, n]), k, window=window, causal=causal, block_size=block_size)
                for h in range(heads):
                    keys = torch.cat((context[0][b, h // groups, seen], block[0][b, n, slots, h // groups]))
                    values = torch.cat((context[1][b, h // groups, seen], block[1][b, n, slots, h // groups]))
                    weights = torch.softmax(keys @ queries[b, n, k, h] / math.sqrt(width), dim=0)
                    rows.append(weights @ values)
    return torch.stack(rows).reshape(batch, blocks, block_size, heads * width)


def rms_norm(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    return inputs / torch.sqrt(inputs.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope(vector: Tensor, position: int, theta: float) -> Tensor:
    """Rotate one head vector [Dh] pair by pair."""
    half = len(vector) // 2
    rotated = []
    for i in range(half):
        angle = position * theta ** (-2 * i / len(vector))
        rotated.append(vector[i] * math.cos(angle) - vector[i + half] * math.sin(angle))
    for i in range(half):
        angle = position * theta ** (-2 * i / len(vector))
        rotated.append(vector[i + half] * math.cos(angle) + vector[i] * math.sin(angle))
    return torch.stack(rotated)


def drafter_block(config: DrafterConfig, state: dict[str, Tensor], features: Tensor, embeds: Tensor, anchor: int) -> Tensor:
    """Hidden states [K, D] of one block from features [S, M*D] and embeddings [K, D]."""
    eps, theta, width = config.rms_norm_eps, config.rope_theta, config.head_dim
    groups = config.num_attention_heads // config.num_key_value_heads
    context = rms_norm(features[:anchor] @ state["fc.weight"].T, state["hidden_norm.weight"], eps)
    positions = [*range(anchor), *range(anchor, anchor + len(embeds))]
    hidden = embeds
    for layer, kind in enumerate(config.resolved_layer_types):
        get = lambda name, layer=layer: state[f"layers.{layer}.{name}.weight"]  # noqa: E731
        sliding = kind == "sliding_attention"
        normed = rms_norm(hidden, get("input_layernorm"), eps)
        sources = torch.cat((context, normed))
        heads = []
        for h in range(config.num_attention_heads):
            q_rows, kv_rows = slice(h * width, (h + 1) * width), slice(h // groups * width, (h // groups + 1) * width)
            keys = rms_norm(sources @ get("self_attn.k_proj")[kv_rows].T, get("self_attn.k_norm"), eps)
            keys = torch.stack([rope(key, position, theta) for key, position in zip(keys, positions, strict=True)])
            values = sources @ get("self_attn.v_proj")[kv_rows].T
            queries = rms_norm(normed @ get("self_attn.q_proj")[q_rows].T, get("self_attn.q_norm"), eps)
            outputs = []
            for k, query in enumerate(queries):
                seen, slots = visible(
                    anchor,
                    k,
                    window=config.sliding_window if sliding else None,
                    causal=sliding and config.sliding_causal,
                    block_size=len(embeds),
                )
                index = [*seen, *(anchor + slot for slot in slots)]
                weights = torch.softmax(keys[index] @ rope(query, anchor + k, theta) / math.sqrt(width), dim=0)
                outputs.append(weights @ values[index])
            heads.append(torch.stack(outputs))
        hidden = hidden + torch.cat(heads, dim=-1) @ get("self_attn.o_proj").T
        normed = rms_norm(hidden, get("post_attention_layernorm"), eps)
        inner = functional.silu(normed @ get("mlp.gate_proj").T) * (normed @ get("mlp.up_proj").T)
        hidden = hidden + inner @ get("mlp.down_proj").T
    return rms_norm(hidden, state["norm.weight"], eps)


def labels(input_ids: list[int], mask: list[bool], length: int, anchor: int, block_size: int) -> tuple[list[int], list[bool]]:
    """Label and supervision of every slot of one kept block."""
    found, valid = [0] * block_size, [False] * block_size
    for k in range(1, block_size):
        if anchor + k >= length or not mask[anchor + k]:
            break
        found[k], valid[k] = input_ids[anchor + k], True
    return found, valid


def slot_weights(probabilities: list[float], valid: list[bool], *, objective: str, gamma: float, alpha: float) -> list[float]:
    """Weights of the slots k = 1..K-1 of one block (index 0 is k = 1)."""
    if objective == "decay":
        return [math.exp(-k / gamma) if ok else 0.0 for k, ok in enumerate(valid)]
    certainty = [(1 - alpha) * q + alpha if ok else 1.0 for q, ok in zip(probabilities, valid, strict=True)]
    weights = []
    for j in range(len(valid)):
        terms = [math.prod(certainty[: m + 1]) for m in range(j, len(valid)) if valid[m]]
        weights.append(sum(terms) if valid[j] else 0.0)
    return weights
