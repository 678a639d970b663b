"""Shapes, weights and batches that the checks train on: the published drafter with random features, and smaller ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.gpu.setting import Setting
from dflash.config import Config, DrafterConfig, parse_config
from dflash.model.anchors import AnchorSet, BlockLabels, block_labels, sample_anchors
from dflash.model.backends import choose_attention
from dflash.model.drafter import Drafter
from dflash.model.head import FrozenHead
from dflash.model.logit_rule import LogitRule
from dflash.model.loss import block_loss
from dflash.records import PlannedBatch
from dflash.train.features import FeatureBatch
from dflash.train.footprint import BatchShape, batch_shapes
from dflash.train.group import Alone, Group
from dflash.train.optimizer import build_optimizer
from dflash.train.step import Stepper

PUBLISHED = Path(__file__).parents[2] / "configs" / "train-v2.yaml"
TOKENS, ANCHORS = 4096, 512
INITIAL_STD = 0.02
ALONE = Alone()
ONE_SEQUENCE = (
    f"plan.tokens_per_batch={TOKENS}",
    f"data.max_length_tokens={TOKENS}",
    f"data.bucket_edges_tokens=[{TOKENS}]",
    f"train.anchors.max_per_sequence={ANCHORS}",
    f"train.anchors.max_per_batch={ANCHORS}",
    "plan.max_sequences=1",
)
TOY = (
    (
        "drafter={num_hidden_layers: 2, hidden_size: 32, intermediate_size: 48, num_attention_heads: 4, num_key_value_heads: 2, "
        "head_dim: 16, block_size: 4, target_layer_ids: [1, 3], layer_types: [sliding_attention, full_attention], "
        "sliding_window: 20}"
    ),
    "target.expected={hidden_size: 32, num_hidden_layers: 6, vocab_size: 300, num_parameters: 1000}",
    "target.mask_token_id=5",
    "plan.tokens_per_batch=64",
    "data.max_length_tokens=64",
    "data.bucket_edges_tokens=[64]",
    "plan.max_sequences=1",
    "cluster.device=cpu",
)


def published(*, tiny: bool) -> Config:
    """`configs/train-v2.yaml` with one sequence of 4096 tokens and 512 anchors a micro-batch, or its toy."""
    return parse_config(PUBLISHED.read_text(encoding="utf-8"), origin=PUBLISHED.name, overrides=TOY if tiny else ONE_SEQUENCE)


def middle_drafter(*, tiny: bool) -> DrafterConfig:
    """Large enough for a GPU to be busy, small enough to have two of them."""
    if tiny:
        return published(tiny=True).drafter
    return DrafterConfig(
        num_hidden_layers=3,
        hidden_size=2048,
        intermediate_size=6144,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        block_size=16,
        target_layer_ids=(1, 5, 9),
        layer_types=("sliding_attention", "sliding_attention", "full_attention"),
        sliding_window=512,
        max_position_embeddings=4096,
    )


def new_drafter(setting: Setting, config: DrafterConfig, *, target_hidden_size: int, attention: str = "auto") -> Drafter:
    """A drafter with random weights, made on the device."""
    with setting.device:
        drafter = Drafter(config, target_hidden_size=target_hidden_size)
    randomize(drafter, setting.generator(0))
    drafter.attention = choose_attention(config, wanted=attention, device=setting.device, dtype=setting.dtype).backend  # type: ignore[arg-type]
    return drafter


@torch.no_grad()
def randomize(module: nn.Module, generator: torch.Generator) -> None:
    """Matrices from N(0, 0.02); vectors stay."""
    for parameter in module.parameters():
        if parameter.ndim >= 2:
            parameter.normal_(0.0, INITIAL_STD, generator=generator)


def fullest(config: Config) -> BatchShape:
    """The longest micro-batch of the plan, full."""
    return batch_shapes(config)[-1]


def random_features(setting: Setting, config: Config, shape: BatchShape, *, seed: int) -> FeatureBatch:
    """What a target would hand over for a full batch of random tokens, all supervised."""
    expected, drafter = config.target.expected, config.drafter
    assert expected is not None
    rows, tokens, size = shape.sequences, shape.length_tokens, drafter.block_size
    generator = np.random.default_rng(seed)
    ids = torch.from_numpy(generator.integers(0, expected.vocab_size, (rows, tokens)))
    mask, lengths = torch.ones(rows, tokens, dtype=torch.bool), torch.full((rows,), tokens)
    anchors = sample_anchors(mask, lengths, anchors=config.train.anchors, seed=0, epoch=0, batch_id=seed)
    labels = block_labels(ids, mask, lengths, anchors, block_size=size)
    width, taps = expected.hidden_size, len(drafter.target_layer_ids)
    slots = (rows, anchors.positions.shape[1], size, drafter.hidden_size)
    return FeatureBatch(
        planned=PlannedBatch(position=seed, epoch=0, bucket=0, padded_length_tokens=tokens, rows=tuple(range(rows))),
        features=setting.normal(rows, tokens, taps * width, seed=seed, dtype=setting.dtype),
        block_embeds=setting.normal(*slots, seed=seed + 1, dtype=setting.dtype, scale=0.05),
        anchors=AnchorSet(*(part.to(setting.device) for part in anchors)),
        labels=BlockLabels(*(part.to(setting.device) for part in labels)),
        target_states=None,
        lengths=(tokens,) * rows,
        supervised_tokens=rows * tokens,
        covered_tokens=rows * tokens,
        target_index=0,
    )


def random_head(setting: Setting, *, vocabulary: int, width: int) -> FrozenHead:
    """A frozen head of random numbers."""
    weight = setting.normal(vocabulary, width, seed=99, dtype=setting.dtype, scale=width**-0.5)
    return FrozenHead(weight, LogitRule(scale=1.0, soft_cap=None))


def new_stepper(setting: Setting, config: Config, drafter: Drafter, head: FrozenHead, *, group: Group = ALONE) -> Stepper:
    """The production step, on one rank."""
    return Stepper(
        drafter,
        build_optimizer(drafter, config.train.optimizer, lr=config.train.lr),
        head=head,
        loss=config.train.loss,
        clip_norm=config.train.clip_norm,
        autocast_dtype=None if setting.dtype is torch.float32 else setting.dtype,
        group=group,
    )


def useful_flops(config: Config, batch: FeatureBatch) -> float:
    """Operations that a micro-batch cannot do without, two a multiply-add: forward, and backward to weights and inputs.

    The head has no weight gradient, the context projection no input gradient, slot 0 needs no head; attention counts the visible
    pairs only.
    """
    drafter, expected = config.drafter, config.target.expected
    assert expected is not None
    anchors = batch.anchors.positions[batch.anchors.keep].double()
    slots, context = len(anchors) * drafter.block_size, batch.features.shape[0] * batch.features.shape[1]
    width = drafter.hidden_size
    queries, keys = drafter.num_attention_heads * drafter.head_dim, drafter.num_key_value_heads * drafter.head_dim
    per_slot = width * (2 * queries + 2 * keys + 3 * drafter.intermediate_size)
    dense = 3 * slots * per_slot + 3 * context * width * 2 * keys
    total = 0.0
    for kind in drafter.resolved_layer_types:
        window = drafter.sliding_window if kind == "sliding_attention" and drafter.sliding_window else math.inf
        seen = float(anchors.clamp(max=window).mean()) + drafter.block_size
        total += dense + 3 * slots * seen * 2 * queries
    supervised = float(batch.labels.valid.sum())
    total += 2 * supervised * width * expected.vocab_size
    total += 2 * context * len(drafter.target_layer_ids) * expected.hidden_size * width
    return 2.0 * total


def gradients(drafter: Drafter, head: FrozenHead, batch: FeatureBatch, config: Config, *, dtype: torch.dtype) -> list[Tensor]:
    """Gradients of one micro-batch by the production path, and the drafter's output first."""
    drafter.zero_grad(set_to_none=True)
    lower = dtype is not torch.float32
    with torch.autocast(batch.features.device.type, dtype=dtype if lower else None, enabled=lower):
        hidden = drafter(batch.features, batch.block_embeds, batch.anchors.positions, batch.anchors.keep)
    sums = block_loss(hidden, batch.labels, batch.anchors.keep, head, loss=config.train.loss, target=None)
    sums.objective_sum.backward()  # type: ignore[no-untyped-call]
    return [hidden.detach(), *(p.grad for p in drafter.parameters() if p.grad is not None)]


def differing(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> int:
    """How many of the tensors are not equal bit for bit."""
    return sum(not torch.equal(ours, truth) for ours, truth in zip(found, wanted, strict=True))
