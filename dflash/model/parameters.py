"""The drafter's parameter table as pure arithmetic: names, shapes and counts without building a tensor.

Invariant: the names are those of the published layout (11 tensors a layer and 3 more), and the module's own state has
exactly them; export, import and the memory plan all read this one table.
"""

from __future__ import annotations

import math

from dflash.config import DrafterConfig


def drafter_shapes(config: DrafterConfig, *, target_hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a drafter.

    Args:
        config: the drafter's shape.
        target_hidden_size: width of one tapped target layer.

    Returns:
        Shapes by name: linear weights are [out, in], norms [width].
    """
    width, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, len(config.target_layer_ids) * target_hidden_size)}
    shapes |= {"hidden_norm.weight": (width,), "norm.weight": (width,)}
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.q_proj.weight": (query, width),
            f"{prefix}.self_attn.k_proj.weight": (key, width),
            f"{prefix}.self_attn.v_proj.weight": (key, width),
            f"{prefix}.self_attn.o_proj.weight": (width, query),
            f"{prefix}.self_attn.q_norm.weight": (config.head_dim,),
            f"{prefix}.self_attn.k_norm.weight": (config.head_dim,),
            f"{prefix}.mlp.gate_proj.weight": (inner, width),
            f"{prefix}.mlp.up_proj.weight": (inner, width),
            f"{prefix}.mlp.down_proj.weight": (width, inner),
            f"{prefix}.input_layernorm.weight": (width,),
            f"{prefix}.post_attention_layernorm.weight": (width,),
        }
    return shapes


def drafter_parameter_count(config: DrafterConfig, target_hidden_size: int) -> int:
    """Trainable parameters of a drafter (it has no embedding and no head of its own)."""
    return sum(math.prod(shape) for shape in drafter_shapes(config, target_hidden_size=target_hidden_size).values())
