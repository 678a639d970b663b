"""The ranks of a training: their sum, their words, their common end.

Invariant: a decision that all ranks must share (skip, stop, save) is computed by each of them from the same gathered
words in the same order, so they cannot disagree; gradients are summed once, unnormalised, and divided once.
Hard decision: no DistributedDataParallel. It averages per backward, while here numerators and denominators are summed over
micro-batches and ranks and divided once; one all-reduce of one flat buffer does that exactly, and costs what DDP's buckets cost
without their overlap: on a replica whose drafter waits for targets that time is idle anyway.
A rank that dies closes its connections, which ends every collective of the others with an error; one that stalls ends them at the
timeout. Both are crashes: the supervisor starts the whole group again from a checkpoint. Words travel as JSON, never as pickles.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from dflash.config import ClusterConfig
from dflash.train.processes import STORE_VARIABLE

LOOPBACK = "lo"

ResultT = TypeVar("ResultT")


class BrokenGroupError(RuntimeError):
    """A collective failed: another rank died or stalled. Not an error of the package's own: a restart may mend it."""


class Group(Protocol):
    """The ranks, seen from one of them."""

    @property
    def rank(self) -> int:
        """Number of the own rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def sum_(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` by its sum over all ranks, the same bits on each."""

    def gather(self, word: Any) -> list[Any]:
        """The JSON-able words of all ranks, by rank."""


class Alone:
    """The group of a single rank: no communication at all."""

    rank = 0
    size = 1

    def sum_(self, tensor: torch.Tensor) -> None:
        """The sum of one."""

    def gather(self, word: Any) -> list[Any]:
        """The one word, untouched."""
        return [word]

    def close(self) -> None:
        """Nothing to leave."""


class ProcessGroup:
    """The ranks that torchrun started; gloo on CPUs, NCCL for tensors on GPUs."""

    def __init__(self, cluster: ClusterConfig, *, rank: int, size: int, store: Path | None) -> None:
        """Meet the other ranks.

        Args:
            cluster: device and timeout.
            rank: this rank.
            size: all ranks.
            store: file where they meet; None uses the store that torchrun announced in the environment.

        Raises:
            BrokenGroupError: they did not all come in time.
        """
        self.rank, self.size = rank, size
        _choose_interface(cluster, one_machine=store is not None)
        # Words always go through gloo: they are in host memory, and must not queue behind kernels.
        backend = "gloo" if cluster.device == "cpu" else "cpu:gloo,cuda:nccl"
        timeout = timedelta(seconds=cluster.collective_timeout_s)
        # `env://` reads what torchrun announced.
        place: dict[str, Any] = {"init_method": "env://"} if store is None else {"store": FileStore(str(store), size)}
        _guarded(lambda: dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout, **place))

    def sum_(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` by its sum over all ranks.

        Raises:
            BrokenGroupError: another rank died or stalled.
        """
        _guarded(lambda: dist.all_reduce(tensor, op=dist.ReduceOp.SUM))

    def gather(self, word: Any) -> list[Any]:
        """The JSON-able words of all ranks, by rank; NaN and infinities pass.

        Raises:
            BrokenGroupError: another rank died or stalled.
        """
        mine = torch.frombuffer(bytearray(json.dumps(word).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        _guarded(lambda: dist.all_gather(lengths, torch.tensor([len(mine)])))
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = mine
        words = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        _guarded(lambda: dist.all_gather(words, padded))
        return [json.loads(bytes(text[: int(length)].numpy())) for text, length in zip(words, lengths, strict=True)]

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


def join_group(cluster: ClusterConfig) -> Alone | ProcessGroup:
    """The group that this process belongs to, as torchrun announced it in the environment.

    Raises:
        BrokenGroupError: the ranks did not meet in time.
    """
    if cluster.replicas == 1:
        return Alone()
    store = os.environ.get(STORE_VARIABLE)
    return ProcessGroup(
        cluster, rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]), store=None if store is None else Path(store)
    )


def _choose_interface(cluster: ClusterConfig, *, one_machine: bool) -> None:
    """Ranks of one machine talk through the loopback alone: nothing of them listens on a network."""
    interface = LOOPBACK if one_machine else cluster.network_interface
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface


def _guarded(collective: Callable[[], ResultT]) -> ResultT:
    try:
        return collective()
    except RuntimeError as error:  # torch's DistBackendError, and gloo's plain RuntimeError
        raise BrokenGroupError(f"the ranks lost each other: {error}") from error
