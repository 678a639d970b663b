"""The memory plan: right arithmetic, and true upper estimates of what the code really holds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from dflash.checkpoint.retention import checkpoints_to_delete
from dflash.config import Config, DrafterConfig, parse_config
from dflash.data.plan_build import Planner
from dflash.data.reader import Batch
from dflash.errors import TargetError
from dflash.model.anchors import BlockLabels
from dflash.model.drafter import Drafter
from dflash.model.head import FrozenHead
from dflash.model.logit_rule import LogitRule
from dflash.model.loss import block_loss
from dflash.model.target import load_target
from dflash.records import PlannedBatch
from dflash.train.features import make_maker
from dflash.train.footprint import (
    STAGING_BYTES,
    BatchShape,
    batch_shapes,
    drafter_activation_bytes,
    element_bytes,
    feature_bytes,
    head_chunk_bytes,
)
from dflash.train.memory import TargetShape, memory_plan, plan_memory, plan_payload, render_plan, target_shape

EXPECTED = "expected: {hidden_size: 64, num_hidden_layers: 6, vocab_size: 100, num_parameters: 50_000}"
BASE = f"""
target: {{path: somewhere/else, mask_token_id: 3, {EXPECTED}}}
drafter: {{hidden_size: 64, intermediate_size: 96, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16}}
data: {{num_conversations: 10, max_length_tokens: 64, bucket_edges_tokens: [16, 64]}}
plan: {{tokens_per_batch: 128, max_sequences: 6, pad_multiple_tokens: 8}}
"""
# By hand, for the drafter above with one layer and three taps at hidden 64.
TRAINABLE = 64 * (3 * 64) + 2 * 64 + (64 * 64 * 2 + 2 * 64 * 32 + 2 * 16 + 3 * 64 * 96 + 2 * 64)


def config_of(*overrides: str) -> Config:
    return parse_config(BASE, origin="test", overrides=overrides)


def items_of(config: Config) -> list[dict[str, int]]:
    return [{item.name: item.size_bytes for item in place.items} for place in memory_plan(config).places]


def starting_with(items: dict[str, int], prefix: str) -> int:
    (size,) = [size for name, size in items.items() if name.startswith(prefix)]
    return size


def test_cpu_plan_counts_everything_once_in_float32() -> None:
    config = config_of()
    (items,) = items_of(config)
    assert starting_with(items, "target weights") == 4 * 50_000
    assert starting_with(items, "drafter master weights") == starting_with(items, "gradients") == 4 * TRAINABLE
    assert starting_with(items, "Adam moments") == 8 * TRAINABLE
    assert starting_with(items, "checkpoint snapshot") == 12 * TRAINABLE
    assert starting_with(items, "feature window") == config.train.queues.feature_bytes
    assert not any("bf16" in name or "head, frozen copy" in name or "CUDA" in name for name in items)
    assert memory_plan(config).places[0].total_bytes == sum(items.values())


def test_the_reader_is_counted_as_it_is_configured() -> None:
    (items,) = items_of(config_of("data.reader.cache_mib=7", "data.reader.prefetch_batches=3"))
    assert starting_with(items, "decoded pages that the reader keeps") == 7 * 2**20
    planned = PlannedBatch(position=0, epoch=0, bucket=0, padded_length_tokens=16, rows=tuple(range(6)))
    largest = Batch(planned, np.zeros((8, 16), np.int64), np.zeros((8, 16), np.bool_), np.zeros(6, np.int64))
    assert starting_with(items, "batches read ahead") == 3 * largest.nbytes


def test_gpu_plan_separates_roles_and_halves_what_is_bfloat16() -> None:
    plan = memory_plan(config_of("cluster.device=cuda", "cluster.targets_per_replica=6"))
    assert [(place.name, place.count, place.on_host) for place in plan.places] == [
        ("target GPU", 6, False),
        ("drafter GPU", 1, False),
        ("host memory", 1, True),
    ]
    target, drafter, host = items_of(config_of("cluster.device=cuda", "cluster.targets_per_replica=6"))
    assert starting_with(target, "target weights") == 2 * 50_000
    assert starting_with(drafter, "drafter weights for compute") == 2 * TRAINABLE
    assert starting_with(drafter, "target's head") == 2 * 100 * 64
    # The pinned allocator gives powers of two: 64 x 192 numbers, 64 x 64, ... as what they are rounded up to.
    rounded = 16384 + 2 * 64 + (2 * 4096 + 2 * 2048 + 2 * 16 + 3 * 8192 + 2 * 64)
    assert 12 * TRAINABLE < starting_with(host, "checkpoint snapshot buffers, pinned") == 12 * rounded
    assert starting_with(drafter, "the largest weight's gradient") == 64 * 192 * (2 + 4)
    assert starting_with(target, "features in the making") * 2 * 13 == starting_with(drafter, "features of waiting") * 3 * 2
    # Each of a target's two threads may hold a finished batch on the drafter's device while the window is full.
    one, six = (
        starting_with(items_of(config_of("cluster.device=cuda", f"cluster.targets_per_replica={n}"))[1], "features of waiting")
        for n in (1, 6)
    )
    assert six * 3 == one * 13
    assert starting_with(host, "staging of features") == 6 * 2 * STAGING_BYTES


def test_a_shared_gpu_holds_both_roles_once() -> None:
    apart = memory_plan(config_of("cluster.device=cuda", "cluster.targets_per_replica=2"))
    shared = memory_plan(config_of("cluster.device=cuda", "cluster.targets_per_replica=2", "cluster.share_device=true"))
    assert [(place.name, place.count) for place in shared.places] == [("GPU of target and drafter", 1), ("host memory", 1)]
    gpu, host = ({item.name: item.size_bytes for item in place.items} for place in shared.places)
    assert not any("frozen copy" in name for name in gpu), "the drafter uses the target's own head"
    assert not any("staging" in name for name in host), "nothing travels"
    target, drafter = ({item.name: item.size_bytes for item in place.items} for place in apart.places[:2])
    assert starting_with(gpu, "target weights") == starting_with(target, "target weights")
    assert starting_with(gpu, "target activations") == 2 * starting_with(target, "target activations"), "two workers, one model"
    assert starting_with(gpu, "gradients") == starting_with(drafter, "gradients")
    assert shared.places[0].total_bytes < sum(place.total_bytes for place in apart.places[:2])


@pytest.mark.parametrize(
    ("dtype", "device", "size"), [("auto", "cpu", 4), ("auto", "cuda", 2), ("float16", "cpu", 2), ("float32", "cuda", 4)]
)
def test_automatic_dtypes(dtype: str, device: str, size: int) -> None:
    assert element_bytes(dtype, device=device) == size


def test_capacity_decides_and_is_named() -> None:
    unknown = memory_plan(config_of())
    assert unknown.fits is None
    assert "fit" not in render_plan(unknown).lower()
    total = unknown.places[0].total_bytes
    exact, short = (memory_plan(config_of(f"cluster.device_memory_bytes={size}")) for size in (total, total - 1))
    assert (exact.fits, short.fits) == (True, False)
    assert "DOES NOT FIT" in render_plan(short)
    gpu = memory_plan(config_of("cluster.device=cuda", "cluster.device_memory_bytes=100_000_000_000"))
    assert gpu.fits is True, "the host beside GPUs is not judged by the size of a GPU"


def test_payload_is_plain_json_with_the_derived_numbers() -> None:
    plan = memory_plan(config_of())
    payload = json.loads(json.dumps(plan_payload(plan)))
    assert payload["places"][0]["total_bytes"] == plan.places[0].total_bytes
    assert payload["trainable_parameters"] == TRAINABLE
    assert payload["disk_bytes"] == plan.checkpoints * 12 * TRAINABLE


def test_target_shape_comes_from_the_folder_but_never_from_the_hub() -> None:
    demo = parse_config("{target: {mask_token: x}, data: {num_conversations: 1}}", origin="test")
    shape = target_shape(demo)
    assert (shape.hidden_size, shape.num_hidden_layers, shape.vocab_size) == (128, 4, 512)
    assert Path(shape.source).is_dir()
    hub = parse_config("{target: {path: some-org/some-model, mask_token: x}, data: {num_conversations: 1}}", origin="test")
    with pytest.raises(TargetError, match="some-org/some-model"):
        memory_plan(hub)


SHAPES = [
    ({}, BatchShape(4, 256, 12, 48)),
    ({}, BatchShape(21, 48, 12, 252)),
    ({"num_hidden_layers": 3}, BatchShape(4, 256, 24, 60)),
    (
        {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "block_size": 16},
        BatchShape(2, 512, 64, 128),
    ),
    (
        {"num_hidden_layers": 2, "layer_types": ("sliding_attention", "full_attention"), "sliding_window": 64},
        BatchShape(2, 512, 64, 128),
    ),
]


@pytest.mark.parametrize(("fields", "shape"), SHAPES)
def test_activations_lie_between_what_autograd_saves_and_twice_that(fields: dict[str, Any], shape: BatchShape) -> None:
    config = DrafterConfig(**fields)
    drafter = Drafter(config, target_hidden_size=config.hidden_size)
    drafter.init_weights(0)
    weights = {parameter.untyped_storage().data_ptr() for parameter in drafter.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor  # kept alive, so that no address is used twice
        return tensor

    anchors = torch.linspace(shape.length_tokens // 2, shape.length_tokens - 1, shape.anchors).long().expand(shape.sequences, -1)
    keep = torch.arange(shape.sequences * shape.anchors).view(shape.sequences, shape.anchors) < shape.blocks
    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        drafter(
            torch.randn(shape.sequences, shape.length_tokens, len(config.target_layer_ids) * config.hidden_size),
            torch.randn(shape.sequences, shape.anchors, config.block_size, config.hidden_size),
            anchors,
            keep,
        )
    really = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    assert really <= drafter_activation_bytes(config, shape, number_bytes=4) <= 2 * really


def test_features_equal_what_a_target_worker_hands_over() -> None:
    config = parse_config(
        "{target: {mask_token_id: 3}, data: {num_conversations: 1}, train: {anchors: {max_per_sequence: 9}}}", origin="test"
    )
    target = load_target(config.target, target_layer_ids=(0, 1, 2), device=torch.device("cpu"))
    maker = make_maker(
        target=target, target_index=0, config=config, mask_token_id=3, drafter_device=torch.device("cpu"), dtype=torch.float32
    )
    planned = PlannedBatch(position=0, epoch=0, bucket=0, padded_length_tokens=40, rows=(0, 1, 2))
    batch = Batch(planned, np.full((3, 40), 7), np.ones((3, 40), dtype=bool), np.full(3, 40))
    made = maker.make(batch)
    planned_bytes = feature_bytes(config, BatchShape(3, 40, 9, 27), target_hidden_size=128, number_bytes=4)
    # Anchor positions and flags are the only tensors that the plan leaves out.
    assert planned_bytes <= made.nbytes <= planned_bytes + 3 * 9 * 9


def test_head_chunk_covers_the_buffers_of_the_loss() -> None:
    config = config_of("train.loss.head_chunk_rows=20")
    shape = BatchShape(2, 64, 5, 10)
    block, vocab = config.drafter.block_size, 100
    labels = torch.zeros(2, 5, block, dtype=torch.long)
    valid = torch.ones(2, 5, block, dtype=torch.bool)
    valid[..., 0] = False
    biggest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal biggest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.ndim == 2 and out.shape[1] == vocab and out.shape[0] != 64:
                biggest = max(biggest, out.untyped_storage().nbytes())
            return out

    hidden = torch.randn(2, 5, block, 64, requires_grad=True)
    with Watch():
        head = FrozenHead(torch.randn(vocab, 64), LogitRule(scale=1.0, soft_cap=None))
        block_loss(
            hidden, BlockLabels(labels, valid), torch.ones(2, 5, dtype=torch.bool), head, loss=config.train.loss, target=None
        )
    gradient = 10 * (block - 1) * 64 * 4
    assert biggest == head_chunk_bytes(config, shape, vocab_size=vocab, number_bytes=4) - gradient == 20 * vocab * 4
    half = head_chunk_bytes(config, shape, vocab_size=vocab, number_bytes=2) - gradient // 2
    assert half == 20 * vocab * (2 + 2 + 4), "logits, their float32 copy, exponentials"


@given(
    lengths=st.lists(st.integers(2, 64), min_size=1, max_size=80),
    tokens=st.integers(64, 200),
    sequences=st.integers(1, 12),
    cap=st.integers(1, 40),
    seed=st.integers(0, 9),
    order=st.sampled_from(["interleave", "random"]),
    ladder=st.sampled_from(["null", "1", "3"]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_planned_batch_costs_more_than_the_plan_says(
    lengths: list[int], tokens: int, sequences: int, cap: int, seed: int, order: str, ladder: str
) -> None:
    config = config_of(
        f"plan.tokens_per_batch={tokens}", f"plan.max_sequences={sequences}", f"train.anchors.max_per_batch={cap}",
        f"plan.order={order}", f"plan.max_padded_lengths={ladder}",
    )  # fmt: skip
    bounds = batch_shapes(config)
    caps = config.train.anchors
    values = np.array(lengths)
    [epoch] = Planner(values, np.searchsorted([16, 64], values), plan=config.plan, seed=seed, epochs=1).epochs()
    for rows, length in zip(epoch.size.tolist(), epoch.padded_length.tolist(), strict=True):
        anchors = min(caps.max_per_sequence, math.ceil(caps.per_supervised_token * length))
        blocks = min(rows * anchors, cap)
        real = BatchShape(rows, length, min(anchors, blocks), blocks)
        for cost in (
            lambda shape: drafter_activation_bytes(config.drafter, shape, number_bytes=4),
            lambda shape: feature_bytes(config, shape, target_hidden_size=64, number_bytes=4),
        ):
            assert cost(real) <= max(cost(bound) for bound in bounds)


@given(
    interval=st.integers(1, 30),
    soak=st.integers(1, 100),
    keep_clean=st.integers(1, 4),
    keep_other=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_healthy_run_never_keeps_more_checkpoints_than_planned(interval: int, soak: int, keep_clean: int, keep_other: int) -> None:
    config = config_of(
        f"checkpoint.interval_steps={interval}",
        f"checkpoint.soak_steps={soak}",
        f"checkpoint.keep_clean={keep_clean}",
        f"checkpoint.keep_other={keep_other}",
    )
    on_disk, most = [0], 1
    for step in range(interval, 60 * interval, interval):
        on_disk.append(step)
        most = max(most, len(on_disk))
        states: dict[int, Any] = {saved: "clean" if saved + soak <= step else "probation" for saved in on_disk}
        gone = checkpoints_to_delete(on_disk, states, keep_clean=keep_clean, keep_other=keep_other, pinned=())
        on_disk = [saved for saved in on_disk if saved not in gone]
    assert most <= memory_plan(config).checkpoints


def test_published_shape_needs_eighteen_bytes_a_parameter() -> None:
    config = config_of("cluster.device=cuda")
    drafter = DrafterConfig(
        num_hidden_layers=5,
        hidden_size=5120,
        intermediate_size=17408,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        block_size=16,
        target_layer_ids=(1, 16, 31, 46, 61),
        max_position_embeddings=8208,
    )
    shape = TargetShape(5120, 64, 248_320, 26_900_000_000, "test")
    plan = plan_memory(config.model_copy(update={"drafter": drafter}), shape)
    assert plan.trainable_parameters == 1_730_213_120
    fixed = [item.size_bytes for item in plan.places[1].items[:4]]
    assert sum(fixed) == 18 * plan.trainable_parameters
    assert plan.checkpoint_bytes == pytest.approx(20.76e9, rel=1e-3)
