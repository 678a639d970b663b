"""The work that every system of `train_step.py` does: sizes, weights and inputs, all made from seeds.

Needs torch alone, because the peers run it in an environment of their own. Equal seeds give equal tensors in every process,
so nothing but figures and gradients has to cross between them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MASK_ID = 5
GAMMA = 7.0
CLIP_NORM = 1.0
LR = 1e-4


@dataclass(frozen=True)
class Setting:
    """Sizes of one training step: an 8-layer target of width 256 and its two-layer drafter."""

    tokens: int
    anchors: int
    batch: int = 2
    block_size: int = 16
    vocab: int = 32_000
    width: int = 256
    intermediate: int = 768
    heads: int = 4
    key_heads: int = 2
    head_dim: int = 64
    layers: int = 2
    taps: tuple[int, ...] = (1, 4)
    rope_theta: float = 1e6
    eps: float = 1e-6
    target_layers: int = 8

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Trained tensors by their published names."""
        queries, keys = self.heads * self.head_dim, self.key_heads * self.head_dim
        width, inner = self.width, self.intermediate
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, len(self.taps) * width)}
        shapes |= {"hidden_norm.weight": (width,), "norm.weight": (width,)}
        for layer in range(self.layers):
            prefix = f"layers.{layer}."
            for name, shape in {
                "self_attn.q_proj": (queries, width), "self_attn.k_proj": (keys, width), "self_attn.v_proj": (keys, width),
                "self_attn.o_proj": (width, queries), "self_attn.q_norm": (self.head_dim,), "self_attn.k_norm": (self.head_dim,),
                "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner),
                "input_layernorm": (width,), "post_attention_layernorm": (width,),
            }.items():  # fmt: skip
                shapes[f"{prefix}{name}.weight"] = shape
        return shapes

    def useful_flops(self, mean_anchor: float) -> float:
        """Multiply-adds (counted twice) that the step cannot do without: forward, and backward to weights and inputs.

        The head has no weight gradient, the context projection no input gradient, and slot 0 needs no head; attention counts
        the visible pairs only.
        """
        slots = self.batch * self.anchors * self.block_size
        context = self.batch * self.tokens
        queries, keys = self.heads * self.head_dim, self.key_heads * self.head_dim
        per_slot = self.width * (2 * queries + 2 * keys + 3 * self.intermediate)
        layer = 3 * slots * per_slot + 3 * context * self.width * 2 * keys
        pairs = slots * (mean_anchor + self.block_size)
        attention = 3 * pairs * 2 * queries
        head = 2 * slots * (self.block_size - 1) / self.block_size * self.width * self.vocab
        projection = 2 * context * len(self.taps) * self.width * self.width
        return 2.0 * (self.layers * (layer + attention) + head + projection)


SETTINGS = {"2x2048_64": Setting(tokens=2048, anchors=64), "2x512_128": Setting(tokens=512, anchors=128)}


@dataclass(frozen=True)
class Inputs:
    """Everything a step reads; `anchors` is what the comparison of gradients uses."""

    weights: dict[str, Tensor]
    embedding: Tensor
    head: Tensor
    ids: Tensor
    features: Tensor
    anchors: Tensor


def make_inputs(setting: Setting) -> Inputs:
    """All tensors of a setting."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    weights = {
        name: torch.ones(shape) if name.endswith("norm.weight") else normal(*shape, scale=0.02)
        for name, shape in sorted(setting.weight_shapes().items())
    }
    rows = (setting.batch, setting.tokens)
    return Inputs(
        weights=weights,
        embedding=normal(setting.vocab, setting.width, scale=0.05),
        head=normal(setting.vocab, setting.width, scale=0.05),
        ids=torch.randint(MASK_ID + 1, setting.vocab, rows, generator=generator),
        features=normal(*rows, len(setting.taps) * setting.width),
        anchors=draw_anchors(setting, generator),
    )


def draw_anchors(setting: Setting, generator: torch.Generator) -> Tensor:
    """[B, N] sorted positions, uniform, such that whole blocks fit (one peer draws no others)."""
    last = setting.tokens - setting.block_size
    rows = [torch.randperm(last, generator=generator)[: setting.anchors].sort().values for _ in range(setting.batch)]
    return torch.stack(rows)


def decay_weights(setting: Setting) -> Tensor:
    """[K] weights of the decay objective, zero at the anchor."""
    slots = torch.arange(setting.block_size, dtype=torch.float32)
    return torch.where(slots > 0, torch.exp(-(slots - 1) / GAMMA), torch.zeros(()))
