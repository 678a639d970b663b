"""Bytes of a drafter's weights, gradients and optimizer on one device: replicated or sharded, AdamW or Muon; pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dflash.config import Config
from dflash.model.parameters import drafter_shapes
from dflash.train.footprint import FLOAT32_BYTES, element_bytes

MOMENTS = {"adamw": 2, "muon": 1}
"""Tensors of a matrix' own size that each optimizer keeps; vectors are nothing beside the matrices."""
MUON_WORK_BYTES = FLOAT32_BYTES + 4 * 2
"""An element of the weight that Muon is at: its momentum in float32, and four bfloat16 products."""


def moments_kept(config: Config) -> int:
    """Optimizer tensors a weight tensor."""
    return MOMENTS[config.train.optimizer.kind]


def checkpoint_bytes_per_parameter(config: Config) -> int:
    """Weights and moments in float32."""
    return FLOAT32_BYTES * (1 + moments_kept(config))


def weight_items(config: Config, *, target_hidden_size: int) -> Iterator[tuple[str, int]]:
    """Name and bytes of everything that is there because of the weights."""
    shapes = drafter_shapes(config.drafter, target_hidden_size=target_hidden_size)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    trainable, largest, moments = sum(sizes.values()), max(sizes.values()), moments_kept(config)
    number_bytes = element_bytes(config.train.compute_dtype, device=config.cluster.device)
    ranks = config.cluster.replicas if config.cluster.shard else 1
    own = -(-trainable // ranks)
    share = f", 1/{ranks} of them" if ranks > 1 else ""
    name = "Adam moments, 2 x fp32" if moments > 1 else "Muon's moment, fp32"
    yield f"drafter master weights, fp32{share}", FLOAT32_BYTES * own
    yield f"gradients, fp32{share}", FLOAT32_BYTES * own
    yield f"{name}{share}", moments * FLOAT32_BYTES * own
    if ranks > 1:
        layer = sum(size for name, size in sizes.items() if name.startswith("layers.0."))
        outside = sum(size for name, size in sizes.items() if not name.startswith("layers."))
        # What lies outside the layers stays gathered; of the layers, one at work and the next one on its way.
        yield "gathered weights: two layers and what is outside them, fp32", FLOAT32_BYTES * (outside + 2 * layer)
        yield "gradients of the largest part, whole, and on their way to the ranks", 2 * FLOAT32_BYTES * max(layer, outside)
    if number_bytes != FLOAT32_BYTES:
        yield "drafter weights for compute, bf16", number_bytes * trainable
        # Autograd makes it in the compute dtype, casts it and only then adds it.
        yield "the largest weight's gradient on its way into the sum", (number_bytes + FLOAT32_BYTES) * largest
    if config.train.optimizer.kind == "muon":
        yield "Muon's work on the largest weight", MUON_WORK_BYTES * largest
