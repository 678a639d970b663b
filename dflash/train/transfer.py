"""Carrying features from a target's device to the drafter's, beside the computation of both.

Invariant: `carry` returns tensors that are complete: whoever takes them out of the reorder window may use them on any stream, and
their bytes are counted by the window only once they exist. The waiting is done by the thread that carries, which holds neither
the interpreter lock nor the target's compute lock then: a target computes the next batch meanwhile.
Hard decision: the way is probed, not configured. Peer-to-peer is used where the driver allows it and a copy through it arrives
intact (it has been seen to be allowed and broken behind some IOMMUs); else chunks go through two pinned host buffers, so that one
chunk leaves the source while the one before enters the destination.
Only `Plain` and the staged way on host memory have ever run in tests: see docs/never-run.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Protocol

import torch

from dflash.train.footprint import STAGING_BYTES

logger = logging.getLogger(__name__)

_PROBE_NUMBERS = 1 << 20


class Courier(Protocol):
    """A way from one device to another."""

    def carry(self, tensor: torch.Tensor) -> torch.Tensor:
        """A complete copy of a tensor on the destination (the tensor itself where it is there already)."""


class Plain:
    """Within one device, or between a device and pageable host memory: torch's own copy."""

    def __init__(self, destination: torch.device) -> None:
        self._destination = destination

    def carry(self, tensor: torch.Tensor) -> torch.Tensor:
        """A complete copy on the destination."""
        return tensor.to(self._destination)


class Peer:
    """GPU to GPU directly, on a stream of its own."""

    def __init__(self, source: torch.device, destination: torch.device) -> None:
        self._source, self._destination = source, destination
        self._stream = torch.cuda.Stream(destination)  # type: ignore[no-untyped-call]

    def carry(self, tensor: torch.Tensor) -> torch.Tensor:
        """A complete copy on the destination."""
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(self._source))
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            copy = torch.empty_like(tensor, device=self._destination)
            copy.copy_(tensor, non_blocking=True)
            done.record(self._stream)
        done.synchronize()
        # Made on this stream, used on the drafter's: the allocator must not reuse it before that is done with it.
        copy.record_stream(torch.cuda.default_stream(self._destination))
        return copy


class Staged:
    """GPU to GPU through two pinned host buffers; on host memory the same without streams."""

    def __init__(self, source: torch.device, destination: torch.device, *, buffer_bytes: int) -> None:
        self._source, self._destination = source, destination
        self._cuda = source.type == "cuda"
        self._buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(2)]
        self._out = torch.cuda.Stream(source) if self._cuda else None  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(destination) if self._cuda else None  # type: ignore[no-untyped-call]

    def carry(self, tensor: torch.Tensor) -> torch.Tensor:
        """A complete copy on the destination."""
        tensor = tensor.contiguous()
        if self._out is not None:
            self._out.wait_stream(torch.cuda.current_stream(self._source))
        with torch.cuda.stream(self._in):
            copy = torch.empty_like(tensor, device=self._destination)
        from_bytes, to_bytes = tensor.view(-1).view(torch.uint8), copy.view(-1).view(torch.uint8)
        emptied: list[torch.cuda.Event | None] = [None, None]
        for number, (begin, end) in enumerate(chunks(len(from_bytes), size=len(self._buffers[0]))):
            emptied[number % 2] = self._carry_chunk(
                from_bytes[begin:end], to_bytes[begin:end], self._buffers[number % 2], emptied[number % 2]
            )
        if self._in is not None:
            for event in emptied:
                if event is not None:
                    event.synchronize()
            copy.record_stream(torch.cuda.default_stream(self._destination))
        return copy

    def _carry_chunk(
        self, chunk: torch.Tensor, place: torch.Tensor, buffer: torch.Tensor, emptied: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Through one buffer, once what it held has left it; returns the event of its leaving."""
        staged = buffer[: len(chunk)]
        if self._out is None or self._in is None:
            staged.copy_(chunk)
            place.copy_(staged)
            return None
        if emptied is not None:
            self._out.wait_event(emptied)
        with torch.cuda.stream(self._out):
            staged.copy_(chunk, non_blocking=True)
        self._in.wait_stream(self._out)
        with torch.cuda.stream(self._in):
            place.copy_(staged, non_blocking=True)
            left = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            left.record(self._in)
        return left


def choose_courier(source: torch.device, destination: torch.device) -> Courier:
    """The best way between two devices that works."""
    if source == destination or "cpu" in (source.type, destination.type):
        return Plain(destination)
    if torch.cuda.can_device_access_peer(destination, source) and arrives(Peer(source, destination), source):
        logger.info("features go from %s to %s directly", source, destination)
        return Peer(source, destination)
    logger.info("features go from %s to %s through pinned host memory", source, destination)
    return Staged(source, destination, buffer_bytes=STAGING_BYTES)


def arrives(courier: Courier, source: torch.device) -> bool:
    """Whether a copy of known numbers is the same when it has arrived."""
    sent = torch.arange(_PROBE_NUMBERS, dtype=torch.int32, device=source)
    return torch.equal(courier.carry(sent).cpu(), sent.cpu())


def chunks(total: int, *, size: int) -> Iterator[tuple[int, int]]:
    """[begin, end) stretches of at most `size` that cover `total`."""
    return ((begin, min(begin + size, total)) for begin in range(0, total, size))
