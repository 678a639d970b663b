"""The drafter's attention backends, and the probe that chooses one.

Invariant: every backend computes the same attention; which one runs is measured on the device it shall run on, never assumed
from names or versions, and the reason is logged.
Hard decision: no backend ever builds a dense [N*K, S + N*K] mask. `chunked` (SDPA over a few neighbouring blocks) works
everywhere; `lean` (the same chunks on the CPU's flash kernel, without copies kept for the backward) is taken on a CPU and `flex`
(flex attention, compiled once a static shape; it has no backward on a CPU) on a GPU, where forward and backward agree with
`chunked`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from dflash.config import DrafterConfig
from dflash.errors import DeviceError
from dflash.model.attention import AttentionChunk, BlockLayout, Visibility, attend_blocks, plan_chunks
from dflash.model.flex import FlexAttention
from dflash.model.lean import LeanAttention

logger = logging.getLogger(__name__)

PROBE_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Relative; float32 may run on TF32 units. A wrong mask is off by more than 0.5."""
PROBE_ANCHORS, PROBE_CONTEXT_TOKENS, PROBE_WINDOW_TOKENS = ((3, 130, 131, 290, 299), (1, 64, 128, 129, 129)), 300, 100


class AttentionBackend(Protocol):
    """How the training forward attends."""

    @property
    def name(self) -> str:
        """As the config and the log call it."""

    def context_tokens(self, anchors: Tensor, *, available: int) -> int:
        """Context tokens to project: at least all that any block sees."""

    def plan(self, layout: BlockLayout, *, visibility: Visibility, dtype: torch.dtype) -> Any:
        """What all layers of one visibility share for one batch."""

    def attend(self, queries: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], plan: Any) -> Tensor:
        """Queries [B, N, K, H, Dh], context [B, Hkv, S, Dh], block [B, N, K, Hkv, Dh] -> [B, N, K, H * Dh]."""


class ChunkedAttention:
    """SDPA over chunks of neighbouring blocks."""

    name = "chunked"

    def context_tokens(self, anchors: Tensor, *, available: int) -> int:
        """Nothing at or behind the last anchor is visible to any block."""
        return min(max(int(anchors.max()), 1), available)

    def plan(self, layout: BlockLayout, *, visibility: Visibility, dtype: torch.dtype) -> tuple[AttentionChunk, ...]:
        """Chunks with their masks."""
        return plan_chunks(layout, visibility=visibility, dtype=dtype)

    def attend(
        self, queries: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], plan: Sequence[AttentionChunk]
    ) -> Tensor:
        """See `attend_blocks`."""
        return attend_blocks(queries, context, block, plan)


class Choice(NamedTuple):
    """The backend to use and why."""

    backend: AttentionBackend
    reason: str


def choose_attention(
    config: DrafterConfig, *, wanted: Literal["auto", "flex", "chunked"], device: torch.device, dtype: torch.dtype
) -> Choice:
    """Choose the backend of a drafter on a device, by measuring.

    Args:
        config: the drafter's shape.
        wanted: `auto` takes `lean` on a CPU and `flex` on a GPU where the probe passes; `flex` insists; `chunked` asks no probe.
        device: where the drafter trains.
        dtype: of queries and keys.

    Returns:
        The choice; its reason is logged.

    Raises:
        DeviceError: flex attention is insisted on and its probe fails.
    """
    choice = _choose(config, wanted, device, dtype)
    logger.info("attention: %s (%s)", choice.backend.name, choice.reason)
    return choice


def _choose(config: DrafterConfig, wanted: str, device: torch.device, dtype: torch.dtype) -> Choice:
    if wanted == "chunked":
        return Choice(ChunkedAttention(), "asked for by train.attention")
    backend: AttentionBackend = LeanAttention() if device.type == "cpu" else FlexAttention()
    trouble = "flex attention has no backward on a CPU" if wanted == "flex" and device.type == "cpu" else None
    trouble = trouble or probe(backend, config, device=device, dtype=dtype)
    if trouble is None:
        return Choice(backend, f"forward and backward agree with chunked on {device}")
    if wanted == "flex":
        raise DeviceError(f"flex attention cannot be used: {trouble}", remedy="set train.attention to auto or chunked")
    return Choice(ChunkedAttention(), trouble)


def probe(backend: AttentionBackend, config: DrafterConfig, *, device: torch.device, dtype: torch.dtype) -> str | None:
    """Compare a backend with `chunked`, forward and backward, in the drafter's own head shape; None if they agree."""
    window = min(PROBE_WINDOW_TOKENS, config.sliding_window or PROBE_WINDOW_TOKENS)
    kinds = {Visibility(window=None, causal=False)}
    if "sliding_attention" in config.resolved_layer_types:
        kinds.add(Visibility(window=window, causal=config.sliding_causal))
    for kind in kinds:
        try:
            found = _probe_run(backend, config, kind, device, dtype)
        except Exception as error:  # noqa: BLE001 - compilers fail in many ways, and each only means: not this backend
            return f"{backend.name} attention failed on {device}: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        wanted = _probe_run(ChunkedAttention(), config, kind, device, dtype)
        for ours, reference in zip(found, wanted, strict=True):
            distance = float((ours - reference).norm() / reference.norm().clamp_min(1e-30))
            if not distance <= PROBE_TOLERANCE[dtype]:
                return f"{backend.name} attention is off by {distance:.2g} on {device}"
    return None


def _probe_run(
    backend: AttentionBackend, config: DrafterConfig, kind: Visibility, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """Output and gradients on random blocks, the last of them padded; float32."""
    generator = torch.Generator().manual_seed(0)
    anchors = torch.tensor(PROBE_ANCHORS, device=device)
    keep = torch.ones_like(anchors, dtype=torch.bool)
    keep[1, -1] = False
    batch, blocks = anchors.shape
    heads, key_heads, width, slots = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.block_size

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    queries = leaf(batch, blocks, slots, heads, width)
    context = (leaf(batch, key_heads, PROBE_CONTEXT_TOKENS, width), leaf(batch, key_heads, PROBE_CONTEXT_TOKENS, width))
    block = (leaf(batch, blocks, slots, key_heads, width), leaf(batch, blocks, slots, key_heads, width))
    direction = torch.randn((batch, blocks, slots, heads * width), generator=generator).to(device, dtype)
    layout = BlockLayout(anchors, keep, PROBE_CONTEXT_TOKENS, slots, heads // key_heads)
    output = backend.attend(queries, context, block, backend.plan(layout, visibility=kind, dtype=dtype))
    kept = output * keep[:, :, None, None]
    gradients = torch.autograd.grad((kept * direction).sum(), (queries, *context, *block))
    return [tensor.detach().float() for tensor in (kept, *gradients)]
