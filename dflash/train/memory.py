"""The memory plan of a configuration: what each device, the host and the disk must hold, before anything is started.

Invariant: pure arithmetic over the configuration and the target's shape; no weights, no GPU and no hub are needed where
`target.expected` is given. Figures are upper estimates of steady training at the most expensive bucket.
Hard decision: 18 bytes a trainable parameter on a GPU (fp32 master weights, gradients and two Adam moments, and a bfloat16
copy), so the drafter's optimizer, not the target, is usually what fills its device: 31 GB for 1.73 B parameters.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash.config import Config
from dflash.errors import TargetError
from dflash.model.parameters import drafter_parameter_count, drafter_shapes
from dflash.model.target_info import read_target_info
from dflash.train.footprint import (
    FLOAT32_BYTES,
    STAGING_BYTES,
    BatchShape,
    batch_shapes,
    drafter_activation_bytes,
    element_bytes,
    feature_bytes,
    head_chunk_bytes,
    recomputed_activation_bytes,
    target_activation_bytes,
)
from dflash.train.weight_memory import checkpoint_bytes_per_parameter, weight_items

GB = 1e9
PROCESS_BYTES = 512 * 2**20
"""Interpreter, torch and transformers in host memory (380 MiB measured)."""
CUDA_CONTEXT_BYTES = 2**30
"""CUDA context, library workspaces and collective buffers of one GPU."""
FRAGMENTATION_FRAC = 0.05
"""Allocator slack on a GPU, on top of everything else."""
COLLATED_TOKEN_BYTES = 9
"""A padded token of a batch in host memory: its id (int64) and its place in the loss mask."""
LENGTH_BYTES = 8
"""A sequence's length in a batch."""


@dataclass(frozen=True, slots=True)
class TargetShape:
    """What the plan needs to know of the target.

    Attributes:
        source: where the numbers come from.
    """

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    num_parameters: int
    source: str


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One line of a plan."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """What one kind of place must hold.

    Attributes:
        count: places of this kind.
        on_host: host memory rather than a GPU's.
        capacity_bytes: memory of one of them; None if the configuration does not say.
    """

    name: str
    count: int
    items: tuple[MemoryItem, ...]
    capacity_bytes: int | None
    on_host: bool

    @property
    def total_bytes(self) -> int:
        """Sum of the items, for one place."""
        return sum(item.size_bytes for item in self.items)

    @property
    def fits(self) -> bool | None:
        """Whether one place holds it; None where the capacity is unknown."""
        return None if self.capacity_bytes is None else self.total_bytes <= self.capacity_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The whole plan.

    Attributes:
        checkpoint_bytes: one checkpoint; `checkpoints`: most of them on disk at once in a healthy run.
    """

    target: TargetShape
    trainable_parameters: int
    places: tuple[DevicePlan, ...]
    checkpoint_bytes: int
    checkpoints: int

    @property
    def disk_bytes(self) -> int:
        """Checkpoints on disk at once."""
        return self.checkpoint_bytes * self.checkpoints

    @property
    def fits(self) -> bool | None:
        """False if any device is too small, None if a capacity is unknown, else True; the host beside GPUs is not judged."""
        answers = [place.fits for place in self.places if not (place.on_host and len(self.places) > 1)]
        return False if False in answers else None if None in answers else True


def target_shape(config: Config) -> TargetShape:
    """Shape of the target: as expected by the configuration, else read from its folder (never from the hub).

    Raises:
        TargetError: the configuration expects nothing and the target is no folder on this machine, or a broken one.
    """
    expected = config.target.expected
    if expected is not None:
        return TargetShape(
            hidden_size=expected.hidden_size,
            num_hidden_layers=expected.num_hidden_layers,
            vocab_size=expected.vocab_size,
            num_parameters=expected.num_parameters,
            source="target.expected",
        )
    if not Path(config.target.location).is_dir():
        raise TargetError(
            f"target {config.target.location!r} is no folder on this machine and target.expected does not give its shape",
            remedy="fetch the target first, or fill in target.expected",
        )
    info = read_target_info(config.target)
    return TargetShape(info.hidden_size, info.num_hidden_layers, info.vocab_size, info.num_parameters, source=info.location)


def memory_plan(config: Config) -> MemoryPlan:
    """The plan of a configuration on its own devices.

    Raises:
        TargetError: the target's shape is not known; see `target_shape`.
    """
    return plan_memory(config, target_shape(config))


def plan_memory(config: Config, target: TargetShape) -> MemoryPlan:
    """The plan for a given target shape."""
    trainable = drafter_parameter_count(config.drafter, target.hidden_size)
    target_items = _target_items(config, target)
    drafter_items = _drafter_items(config, target)
    host_items = _host_items(config, target, trainable)
    cluster = config.cluster
    places: tuple[DevicePlan, ...]
    if cluster.device == "cpu":
        places = (
            DevicePlan(
                "this machine (CPU)", 1, target_items + drafter_items + host_items, cluster.device_memory_bytes, on_host=True
            ),
        )
    else:
        roles = [
            ("target GPU", cluster.replicas * cluster.targets_per_replica, target_items),
            ("drafter GPU", cluster.replicas, drafter_items),
        ]
        if cluster.share_device:
            roles = [("GPU of target and drafter", cluster.replicas, target_items + drafter_items)]
        capacity = cluster.device_memory_bytes
        gpus = (DevicePlan(name, count, _with_cuda(items), capacity, on_host=False) for name, count, items in roles)
        places = (*gpus, DevicePlan("host memory", cluster.replicas, host_items, None, on_host=True))
    return MemoryPlan(
        target=target,
        trainable_parameters=trainable,
        places=places,
        checkpoint_bytes=checkpoint_bytes_per_parameter(config) * trainable,
        checkpoints=_checkpoints_on_disk(config),
    )


def render_plan(plan: MemoryPlan) -> str:
    """The plan as a table in decimal gigabytes."""
    lines = []
    for place in plan.places:
        lines.append(f"{place.name}{f' x {place.count}, each' if place.count > 1 else ''}")
        lines += [f"  {item.size_bytes / GB:9.3f} GB  {item.name}" for item in place.items]
        lines.append(f"  {place.total_bytes / GB:9.3f} GB  total{_verdict(place)}")
    each = f"{plan.checkpoint_bytes / GB:.3f} GB"
    lines += ["disk", f"  {plan.disk_bytes / GB:9.3f} GB  checkpoints, at most {plan.checkpoints} of {each} in a healthy run"]
    return "\n".join(lines)


def plan_payload(plan: MemoryPlan) -> dict[str, Any]:
    """The plan as JSON-able values."""
    places = [{**asdict(place), "total_bytes": place.total_bytes, "fits": place.fits} for place in plan.places]
    return {**asdict(plan), "places": places, "disk_bytes": plan.disk_bytes, "fits": plan.fits}


def _verdict(place: DevicePlan) -> str:
    if place.capacity_bytes is None:
        return ""
    return f" of {place.capacity_bytes / GB:.1f} GB: {'fits' if place.fits else 'DOES NOT FIT'}"


def _target_items(config: Config, target: TargetShape) -> tuple[MemoryItem, ...]:
    number_bytes = element_bytes(config.target.dtype, device=config.cluster.device)
    # Where the target threads share one model, each still has a batch of its own in hand.
    workers = config.cluster.targets_per_replica if config.cluster.devices_per_replica <= 1 else 1
    shapes = batch_shapes(config)
    activations = max(
        target_activation_bytes(shape, target_hidden_size=target.hidden_size, number_bytes=number_bytes) for shape in shapes
    )
    # On a GPU a target has two threads: beside the batch that one of them makes, the other's is on its way.
    in_hand = (2 if config.cluster.device == "cpu" else 3) * workers * _batch_bytes(config, target, number_bytes)
    return (
        MemoryItem("target weights, frozen", target.num_parameters * number_bytes),
        MemoryItem("target activations of the largest batch", workers * activations),
        MemoryItem("features in the making (taps and their concatenation) and on their way", in_hand),
    )


def _drafter_items(config: Config, target: TargetShape) -> tuple[MemoryItem, ...]:
    device = config.cluster.device
    number_bytes = element_bytes(config.train.compute_dtype, device=device)
    features = _batch_bytes(config, target, number_bytes)
    window = max(config.train.queues.feature_bytes, features)
    waiting = config.cluster.targets_per_replica * (1 if device == "cpu" else 2)
    items = [MemoryItem(name, size) for name, size in weight_items(config, target_hidden_size=target.hidden_size)]
    if config.cluster.devices_per_replica > 1:  # on one device the drafter uses the target's own head
        head = target.vocab_size * target.hidden_size * element_bytes(config.target.dtype, device=device)
        items.append(MemoryItem("target's head, frozen copy", head))
    items += [
        MemoryItem("feature window (train.queues.feature_bytes, at least one batch)", window),
        # A thread that waits for room in the window has its batch on the drafter's device already.
        MemoryItem("features of waiting targets and of the batch in training", (1 + waiting) * features),
    ]
    return (*items, *_step_items(config, target, number_bytes))


def _step_items(config: Config, target: TargetShape, number_bytes: int) -> tuple[MemoryItem, ...]:
    """Activations and the head's chunk of the bucket where they are largest together."""
    activations_of = recomputed_activation_bytes if config.train.recompute_layers else drafter_activation_bytes
    costs: dict[BatchShape, tuple[int, int]] = {
        shape: (
            activations_of(config.drafter, shape, number_bytes=number_bytes),
            head_chunk_bytes(config, shape, vocab_size=target.vocab_size, number_bytes=number_bytes),
        )
        for shape in batch_shapes(config)
    }
    worst = max(costs, key=lambda shape: sum(costs[shape]))
    text = f"{worst.sequences} x {worst.length_tokens} tokens, {worst.blocks} blocks"
    activations, chunk = costs[worst]
    return (
        MemoryItem(f"drafter activations and their gradients ({text})", activations),
        MemoryItem("one chunk of logits and the head's gradient", chunk),
    )


def _host_items(config: Config, target: TargetShape, trainable: int) -> tuple[MemoryItem, ...]:
    reader = config.data.reader
    batch_bytes = config.plan.tokens_per_batch * COLLATED_TOKEN_BYTES + config.plan.max_sequences * LENGTH_BYTES
    snapshot = MemoryItem("checkpoint snapshot buffers", checkpoint_bytes_per_parameter(config) * trainable)
    if config.cluster.device == "cuda":
        pinned = _pinned_bytes(config, target)
        snapshot = MemoryItem("checkpoint snapshot buffers, pinned (the allocator gives powers of two)", pinned)
    staged = 2 * STAGING_BYTES * config.cluster.targets_per_replica
    staging = MemoryItem("staging of features between devices, pinned", staged)
    return (
        snapshot,
        MemoryItem("batches ready for a target (train.queues.ready_bytes)", config.train.queues.ready_bytes),
        MemoryItem("decoded pages that the reader keeps (data.reader.cache_mib)", reader.cache_mib * 2**20),
        MemoryItem("batches read ahead (data.reader.prefetch_batches)", reader.prefetch_batches * batch_bytes),
        MemoryItem("interpreter and libraries", PROCESS_BYTES),
        *((staging,) if config.cluster.devices_per_replica > 1 else ()),
    )


def _pinned_bytes(config: Config, target: TargetShape) -> int:
    """Weights and moments, a buffer a tensor, each rounded up to a power of two as torch's pinned allocator does."""
    shapes = drafter_shapes(config.drafter, target_hidden_size=target.hidden_size).values()
    sizes = (FLOAT32_BYTES * math.prod(shape) for shape in shapes)
    return checkpoint_bytes_per_parameter(config) // FLOAT32_BYTES * sum(1 << (size - 1).bit_length() for size in sizes)


def _with_cuda(items: tuple[MemoryItem, ...]) -> tuple[MemoryItem, ...]:
    slack = int(FRAGMENTATION_FRAC * sum(item.size_bytes for item in items))
    return (*items, MemoryItem("CUDA context and workspaces", CUDA_CONTEXT_BYTES), MemoryItem("allocator slack, 5 %", slack))


def _batch_bytes(config: Config, target: TargetShape, number_bytes: int) -> int:
    """The largest micro-batch of features."""
    return max(
        feature_bytes(config, shape, target_hidden_size=target.hidden_size, number_bytes=number_bytes)
        for shape in batch_shapes(config)
    )


def _checkpoints_on_disk(config: Config) -> int:
    """step-0, the kept ones, the best by its probes, those younger than their soak, and the one being written."""
    checkpoint = config.checkpoint
    unsettled = -(-checkpoint.soak_steps // checkpoint.interval_steps)
    best = 1 if config.probe.every_steps else 0
    return 1 + checkpoint.keep_clean + checkpoint.keep_other + best + unsettled + 1
