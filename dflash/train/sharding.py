"""A drafter whose weights, gradients and moments are spread over the ranks (FSDP2), for drafters too large for one device.

Invariant: what leaves the ranks is whole: a checkpoint is gathered by all and written by rank 0 in the one layout there is, and
each rank cuts its part out of it, so a run may go on sharded or replicated, on as many ranks as it likes.
Hard decisions. Gradients are summed, not averaged, because the step divides once by the summed denominators. A forward is a
collective here: ranks with fewer micro-batches in a step join the others' passes with an empty block of weight zero.
The price: a layer's weights travel twice a micro-batch and its gradients once; in float32, so that the numbers are those of
replicated weights. Not for drafters that fit: those are summed once a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from dflash.checkpoint import CheckpointWriter
from dflash.config import DrafterConfig
from dflash.model.drafter import Drafter
from dflash.records import TrainerState
from dflash.train.group import Group


def sharded_drafter(config: DrafterConfig, *, target_hidden_size: int, device: torch.device) -> Drafter:
    """A drafter spread over all ranks of the process group, its weights not set yet; never whole on any device."""
    ranks = dist.group.WORLD
    if ranks is None:
        raise RuntimeError("a sharded drafter is made after the ranks have met")
    mesh = DeviceMesh.from_group(ranks, device.type)
    with torch.device("meta"):
        drafter = Drafter(config, target_hidden_size=target_hidden_size)
    for module in (*drafter.layers, drafter):
        fully_shard(module, mesh=mesh)
    drafter.to_empty(device=device)
    for module in drafter.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # The factor alone would become a scaled sum, which gloo does not have.
            module.set_force_sum_reduction_for_comms(enable=True)
    return drafter


def is_sharded(module: nn.Module) -> bool:
    """Whether a module's weights are spread over ranks."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds, sharing its memory; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fill(live: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy a whole tensor into a live one, or this rank's part of it into a sharded one; nothing is sent."""
    if isinstance(live, DTensor):
        parted = distribute_tensor(whole.to(live.device), live.device_mesh, live.placements, src_data_rank=None)
        live.to_local().copy_(parted.to_local())
    else:
        live.copy_(whole)


def join_pass(drafter: Drafter) -> None:
    """Take part in another rank's forward and backward, adding nothing to the gradients."""
    device, width = own_part(drafter.fc.weight).device, drafter.config.hidden_size
    features = torch.zeros(1, 1, drafter.fc.in_features, device=device)
    block = torch.zeros(1, 1, drafter.config.block_size, width, device=device)
    anchors, keep = torch.zeros(1, 1, dtype=torch.int64, device=device), torch.ones(1, 1, dtype=torch.bool, device=device)
    (drafter(features, block, anchors, keep).sum() * 0.0).backward()


class CalledOthers:
    """Rank 0's one word about a save: whether the others are needed for it.

    Attributes:
        called: they were called since the last save began.
    """

    def __init__(self, group: Group) -> None:
        self.called = False
        self._group = group

    def call(self) -> None:
        """A snapshot begins: every tensor is gathered now."""
        self.called = True
        self._group.gather(True)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Whatever becomes of the save in this block, the other ranks hear exactly one word about it."""
        self.called = False
        try:
            yield
        finally:
            if not self.called:
                self._group.gather(False)


class GatheringSaver:
    """Checkpoints of a sharded drafter as rank 0 sees them; the writer calls the others when it makes a snapshot."""

    def __init__(self, writer: CheckpointWriter, others: CalledOthers) -> None:
        self._writer = writer
        self._others = others

    def save(self, state: TrainerState, *, wait: bool) -> bool:
        """As the writer's."""
        with self._others.told():
            return self._writer.save(state, wait=wait)

    def save_within(self, state: TrainerState, *, budget_s: float) -> bool:
        """As the writer's."""
        with self._others.told():
            return self._writer.save_within(state, budget_s=budget_s)


class JoiningSaver:
    """Checkpoints of a sharded drafter as all other ranks see them."""

    def __init__(self, tensors: tuple[Mapping[str, torch.Tensor], ...], group: Group) -> None:
        """`tensors`: what the writer saves, in its order."""
        self._tensors = tensors
        self._group = group

    def save(self, state: TrainerState, *, wait: bool) -> bool:  # noqa: ARG002
        """Hand over the own parts if rank 0 makes a snapshot."""
        if self._group.gather(None)[0]:
            for named in self._tensors:
                for tensor in named.values():
                    whole(tensor)
        return True

    def save_within(self, state: TrainerState, *, budget_s: float) -> bool:  # noqa: ARG002
        """Likewise."""
        return self.save(state, wait=False)


@torch.no_grad()
def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor, gathered from all ranks if it is sharded: a collective then."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
