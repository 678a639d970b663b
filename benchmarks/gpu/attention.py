"""Attention on the device: does flex attention run, do all backends agree with the rule, what do they cost."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.setting import Figures, Setting, relative, require
from dflash.config import DrafterConfig
from dflash.errors import DeviceError
from dflash.model.attention import BlockLayout, Visibility
from dflash.model.backends import AttentionBackend, ChunkedAttention, choose_attention
from dflash.model.flex import FlexAttention
from dflash.model.lean import LeanAttention

HEADS, KEY_HEADS, WIDTH, BLOCK = 32, 8, 128, 16
"""The published drafter's."""
TINY = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "block_size": 4}
WINDOW = 2048
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative, against float64; bfloat16 rounds each probability and each value to 2**-9."""
KINDS = {"full": Visibility(window=None, causal=False), "sliding": Visibility(window=100, causal=True)}


def published_heads(*, tiny: bool) -> DrafterConfig:
    """A drafter of the published head shape; its other sizes do not matter here."""
    if tiny:
        return DrafterConfig(**TINY, num_hidden_layers=2, layer_types=("sliding_attention", "full_attention"), sliding_window=20)
    return DrafterConfig(
        num_hidden_layers=2,
        hidden_size=1024,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=WIDTH,
        block_size=BLOCK,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=WINDOW,
    )


def flex_probe(setting: Setting) -> Figures:
    """What the trainer itself would choose, and that insisting on flex attention is possible."""
    config = published_heads(tiny=setting.tiny)
    figures: Figures = {}
    for dtype in (torch.bfloat16, torch.float32) if setting.cuda else (torch.float32,):
        choice = choose_attention(config, wanted="auto", device=setting.device, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        figures |= {f"chosen_{name}": choice.backend.name, f"reason_{name}": choice.reason}
    if setting.cuda:
        require(figures["chosen_bfloat16"] == "flex", f"flex attention is not taken: {figures['reason_bfloat16']}")
        choose_attention(config, wanted="flex", device=setting.device, dtype=torch.bfloat16)
    else:
        try:
            choose_attention(config, wanted="flex", device=setting.device, dtype=torch.float32)
        except DeviceError as error:
            figures["insisting_on_flex"] = error.what
        require("insisting_on_flex" in figures, "flex attention was accepted on a CPU")
    return figures


def attention_agreement(setting: Setting) -> Figures:
    """Forward and backward of every backend against a dense computation in float64 from the visibility rule."""
    figures: Figures = {}
    layouts = {"padded": _layout(setting, batch=2, blocks=21, tokens=700), "whole": _layout(setting, batch=1, blocks=9, tokens=300)}
    for dtype in (torch.float32, torch.bfloat16):
        for backend in _backends(setting, dtype):
            worst = 0.0
            for layout in layouts.values():
                for kind in KINDS.values():
                    worst = max(worst, _distance(setting, backend, layout, kind, dtype))
            name = f"{backend.name}_{str(dtype).removeprefix('torch.')}"
            figures[name] = worst
            require(worst <= TOLERANCE[dtype], f"{name} is off by {worst:.2g} (allowed {TOLERANCE[dtype]:.0e})")
    return figures


def attention_speed(setting: Setting) -> Figures:
    """Forward and backward of one layer at the published shape (4096 tokens, 512 blocks), each backend; kernel shapes compiled."""
    figures: Figures = {}
    layout = _layout(setting, batch=1, blocks=512, tokens=4096, whole=True)
    kinds = {"full": KINDS["full"], "sliding": Visibility(window=20 if setting.tiny else WINDOW, causal=True)}
    for backend in _backends(setting, setting.dtype):
        for name, kind in kinds.items():
            leaves, direction = _leaves(setting, layout, setting.dtype)
            plan = backend.plan(layout, visibility=kind, dtype=setting.dtype)

            def work(backend: Any = backend, plan: Any = plan, leaves: Any = leaves, direction: Tensor = direction) -> None:
                output = backend.attend(leaves[0], (leaves[1], leaves[2]), (leaves[3], leaves[4]), plan)
                torch.autograd.grad(output, leaves, direction)

            figures[f"{backend.name}_{name}_ms"] = 1e3 * setting.seconds(work, repeats=5)
            held = setting.held_bytes()
            figures[f"{backend.name}_{name}_peak_mb"] = (setting.peak_bytes(work) - held) / 1e6
        figures[f"{backend.name}_plan_ms"] = 1e3 * setting.seconds(
            lambda backend=backend: backend.plan(layout, visibility=kinds["full"], dtype=setting.dtype), repeats=5
        )
    return figures


def _backends(setting: Setting, dtype: torch.dtype) -> list[AttentionBackend]:
    """Those that can be differentiated on this device."""
    if setting.cuda:
        return [ChunkedAttention(), FlexAttention()]
    return [ChunkedAttention(), LeanAttention()] if dtype == torch.float32 else [ChunkedAttention()]


def _layout(setting: Setting, *, batch: int, blocks: int, tokens: int, whole: bool = False) -> BlockLayout:
    """Sorted anchors anywhere; without `whole` some slots hold no block."""
    if setting.tiny:
        blocks, tokens = min(blocks, 9), min(tokens, 60)
    generator = torch.Generator().manual_seed(blocks)
    anchors = torch.stack([torch.randperm(tokens - 1, generator=generator)[:blocks].sort().values + 1 for _ in range(batch)])
    keep = torch.ones_like(anchors, dtype=torch.bool)
    if batch > 1 and not whole:
        keep[-1, -blocks // 3 :] = False
    config = published_heads(tiny=setting.tiny)
    groups = config.num_attention_heads // config.num_key_value_heads
    return BlockLayout(anchors.to(setting.device), keep.to(setting.device), tokens, config.block_size, groups)


def _leaves(setting: Setting, layout: BlockLayout, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values as the drafter lays them out, and a direction for the gradient."""
    config = published_heads(tiny=setting.tiny)
    batch, blocks = layout.anchors.shape
    heads, keys, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    made = [setting.normal(batch, blocks, layout.block_size, heads, width, seed=0, dtype=dtype)]
    seen = (batch, layout.context_tokens, keys, width)
    made += [setting.normal(*seen, seed=seed, dtype=dtype).transpose(1, 2) for seed in (1, 2)]
    made += [setting.normal(batch, blocks, layout.block_size, keys, width, seed=seed, dtype=dtype) for seed in (3, 4)]
    direction = setting.normal(batch, blocks, layout.block_size, heads * width, seed=5, dtype=dtype)
    return [leaf.requires_grad_() for leaf in made], direction * layout.keep[:, :, None, None]


def _distance(setting: Setting, backend: AttentionBackend, layout: BlockLayout, kind: Visibility, dtype: torch.dtype) -> float:
    """Largest relative difference of the output and of all gradients."""
    leaves, direction = _leaves(setting, layout, dtype)
    plan = backend.plan(layout, visibility=kind, dtype=dtype)
    output = backend.attend(leaves[0], (leaves[1], leaves[2]), (leaves[3], leaves[4]), plan) * layout.keep[:, :, None, None]
    found = [output, *torch.autograd.grad(output, leaves, direction)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    reference = dense(exact, layout, kind) * layout.keep[:, :, None, None]
    wanted = [reference, *torch.autograd.grad(reference, exact, direction.double())]
    return max(relative(ours, truth) for ours, truth in zip(found, wanted, strict=True))


def dense(leaves: list[Tensor], layout: BlockLayout, kind: Visibility) -> Tensor:
    """The rule written out: [N*K, S + N*K] scores, masked, in the dtype of the leaves [B, N, K, H, Dh], [B, Hkv, S, Dh], ..."""
    queries, block_keys, block_values = leaves[0], leaves[3], leaves[4]
    batch, blocks, size, heads, width = queries.shape
    keys, values = (
        torch.cat((seen, own.flatten(1, 2).transpose(1, 2)), dim=2).repeat_interleave(layout.groups, dim=1)
        for seen, own in ((leaves[1], block_keys), (leaves[2], block_values))
    )
    scores = torch.einsum("bqhd,bhkd->bhqk", queries.flatten(1, 2), keys) * width**-0.5
    device = queries.device
    anchor = layout.anchors.repeat_interleave(size, dim=1)[:, :, None]
    number = torch.arange(blocks * size, device=device)
    slot, token = number % size, torch.arange(layout.context_tokens, device=device)
    context = (token < anchor) & (True if kind.window is None else token >= anchor + slot[:, None] - (kind.window - 1))
    own = number[:, None] // size == number // size
    if kind.causal:
        own = own & (slot <= slot[:, None])
    visible = torch.cat((context, own.expand(batch, -1, -1)), dim=-1).unsqueeze(1)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bhkd->bqhd", weights, values).reshape(batch, blocks, size, heads * width)
