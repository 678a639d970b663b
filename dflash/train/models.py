"""The models of one replica: targets, drafter and optimizer, each on its device.

Invariant: target worker i sits on device i of the replica and the drafter on the last one; on a CPU, or where a replica has a
single GPU, all share it (and the weights of one loaded target).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash.config import Config
from dflash.model.backends import choose_attention
from dflash.model.drafter import Drafter
from dflash.model.head import FrozenHead
from dflash.model.target import Target, load_target
from dflash.train.optimizer import Optimizer, build_optimizer, optimizer_tensors
from dflash.train.sharding import sharded_drafter


@dataclass(frozen=True, slots=True)
class Models:
    """Loaded models; the drafter's weights are not set yet.

    Attributes:
        targets: one a worker.
        weights, moments: live tensors by name, what a checkpoint saves.
        compute_dtype: of features and block embeddings; below float32 it is an autocast of the drafter.

    """

    targets: Sequence[Target]
    drafter: Drafter
    optimizer: Optimizer
    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    device: torch.device
    compute_dtype: torch.dtype

    def head(self) -> FrozenHead:
        """The targets' head on the drafter's device.

        Raises:
            TargetError: what this architecture does to its head's output is not known.
        """
        target = self.targets[-1]
        return FrozenHead(target.head_weight.detach().to(self.device), target.logit_rule)


def load_models(config: Config) -> Models:
    """Load the targets and build the drafter with its optimizer; with `cluster.shard` the ranks must have met.

    Raises:
        TargetError, DrafterError: the target cannot be loaded or does not fit.
    """
    devices = replica_devices(config)
    layer_ids = config.drafter.target_layer_ids
    if len(set(devices)) == 1:
        targets = [load_target(config.target, target_layer_ids=layer_ids, device=devices[0])] * (len(devices) - 1)
    else:
        targets = [load_target(config.target, target_layer_ids=layer_ids, device=device) for device in devices[:-1]]
    drafter = _drafter(config, target_hidden_size=targets[0].info.hidden_size, device=devices[-1])
    compute_dtype = compute_dtype_of(config, devices[-1])
    drafter.attention = choose_attention(
        config.drafter, wanted=config.train.attention, device=devices[-1], dtype=compute_dtype
    ).backend
    drafter.recompute_layers = config.train.recompute_layers
    if config.train.compile:
        drafter.compile_dense(backend="inductor")
    optimizer = build_optimizer(drafter, config.train.optimizer, lr=config.train.lr)
    return Models(
        targets=targets,
        drafter=drafter,
        optimizer=optimizer,
        weights={name: parameter.detach() for name, parameter in drafter.named_parameters()},
        moments=optimizer_tensors(drafter, optimizer),
        device=devices[-1],
        compute_dtype=compute_dtype,
    )


def _drafter(config: Config, *, target_hidden_size: int, device: torch.device) -> Drafter:
    if config.cluster.shard:
        return sharded_drafter(config.drafter, target_hidden_size=target_hidden_size, device=device)
    return Drafter(config.drafter, target_hidden_size=target_hidden_size).to(device)


def replica_devices(config: Config) -> list[torch.device]:
    """Devices of this process's replica: its targets', then the drafter's."""
    count = config.cluster.targets_per_replica + 1
    if config.cluster.device == "cpu":
        return [torch.device("cpu")] * count
    first = int(os.environ["LOCAL_RANK"]) * config.cluster.devices_per_replica
    if config.cluster.share_device:
        return [torch.device("cuda", first)] * count
    return [torch.device("cuda", first + index) for index in range(count)]


def compute_dtype_of(config: Config, device: torch.device) -> torch.dtype:
    """Number format that the drafter computes in on a device."""
    name = config.train.compute_dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    return torch.bfloat16 if name == "bfloat16" else torch.float32
