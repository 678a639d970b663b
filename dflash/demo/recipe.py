"""The recipe of the shipped demo target: every number that its weights depend on.

Invariant: (recipe, machine) determine the folder byte for byte; on another CPU the same recipe gives a model of the same
quality, not the same bytes, because the order of floating-point sums differs between vector units.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import Qwen3Config


@dataclass(frozen=True)
class TargetRecipe:
    """Shape, data and schedule of a demo target."""

    seed: int
    steps: int
    step_conversations: int
    batch_tokens: int
    pool_conversations: int
    tokenizer_conversations: int
    heldout_conversations: int
    end_weight: float
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    init_std: float
    peak_lr: float
    warmup_steps: int
    weight_decay: float
    clip_norm: float
    checkpoint_every_steps: int


SHIPPED_RECIPE = TargetRecipe(
    seed=20,
    steps=9000,
    step_conversations=16,
    batch_tokens=1024,
    pool_conversations=4800,
    tokenizer_conversations=6000,
    heldout_conversations=900,
    end_weight=4.0,
    hidden_size=128,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=32,
    intermediate_size=384,
    rope_theta=1e6,
    init_std=0.04,
    peak_lr=1.5e-3,
    warmup_steps=200,
    weight_decay=0.1,
    clip_norm=1.0,
    checkpoint_every_steps=1000,
)


def model_config(recipe: TargetRecipe, *, vocab_size: int, max_positions: int, pad_id: int, end_id: int) -> Qwen3Config:
    """Return the Hugging Face configuration of the recipe's model."""
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        initializer_range=recipe.init_std,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=pad_id,
        eos_token_id=end_id,
    )
