"""Carrying features from a target's device to the drafter's, beside the computation of both.

Invariant: `carry` returns tensors that are complete: whoever takes them out of the reorder window may use them on the drafter's
stream, and their bytes are counted by the window only once they exist. The waiting is done by the thread that carries, which holds
neither the interpreter lock nor the target's compute lock then: a target computes the next batch meanwhile.
A batch's end is marked while its thread still holds the compute lock: an event recorded later would stand behind the next batch,
whose kernels another thread queues at once, and every transfer would wait for a forward that it does not need.
Hard decision: the way is probed, not configured. Peer-to-peer is used where the driver allows it and a copy through it arrives
intact (it has been seen to be allowed and broken behind some IOMMUs); else chunks go through two pinned host buffers, so that one
chunk leaves the source while the one before enters the destination. Where both share one GPU nothing travels, but the target
computes on a stream of its own, or its kernels would queue between the drafter's.
Only `Plain` and the staged way on host memory have ever run in tests: see docs/never-run.md.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from dflash.train.footprint import STAGING_BYTES

logger = logging.getLogger(__name__)

_PROBE_NUMBERS = 1 << 20

Mark = torch.cuda.Event | None
"""The end of some work on a device; None where work ends with the call that asks for it."""


class Courier(Protocol):
    """A way from one device to another."""

    def computing(self) -> AbstractContextManager[object]:
        """Device and stream of the source, for the block that makes what is to be carried."""

    def mark(self) -> Mark:
        """The end of what this thread has asked of the source; to be taken inside `computing`."""

    def carry(self, tensor: torch.Tensor, *, after: Mark) -> torch.Tensor:
        """A complete copy on the destination (the tensor itself where it is there already).

        Args:
            tensor: on the source, or in host memory.
            after: mark behind the work that makes it.
        """


class Plain:
    """Within host memory, or between a device and pageable host memory: torch's own copy."""

    def __init__(self, destination: torch.device) -> None:
        self._destination = destination

    def computing(self) -> AbstractContextManager[object]:
        """Nothing to choose."""
        return nullcontext()

    def mark(self) -> Mark:
        """Copies between pageable memory and a device wait by themselves."""
        return None

    def carry(self, tensor: torch.Tensor, *, after: Mark) -> torch.Tensor:  # noqa: ARG002
        """A complete copy on the destination."""
        return tensor.to(self._destination)


class Beside:
    """Target and drafter on one GPU: the target on a stream of its own, and nothing travels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)  # the weights were loaded on the default stream
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def computing(self) -> AbstractContextManager[object]:
        """The target's stream."""
        return torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        """Behind the work on the target's stream."""
        return _mark_of(self._stream)

    def carry(self, tensor: torch.Tensor, *, after: Mark) -> torch.Tensor:
        """The tensor itself, complete."""
        if tensor.device.type == "cpu":
            return _from_host(tensor, self._device, self._stream)
        _wait(after)
        return _for_drafter(tensor, self._device)


class Peer:
    """GPU to GPU directly, on streams of its own."""

    def __init__(self, source: torch.device, destination: torch.device) -> None:
        self._source, self._destination = source, destination
        self._out = torch.cuda.Stream(source)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(destination)  # type: ignore[no-untyped-call]

    def computing(self) -> AbstractContextManager[object]:
        """The source, as current device: some libraries launch their kernels there, wherever the tensors are."""
        return torch.cuda.device(self._source)

    def mark(self) -> Mark:
        """Behind the work on the source's current stream."""
        return _mark_of(torch.cuda.current_stream(self._source))

    def carry(self, tensor: torch.Tensor, *, after: Mark) -> torch.Tensor:
        """A complete copy on the destination."""
        if tensor.device.type == "cpu":
            return _from_host(tensor, self._destination, self._in)
        # torch copies between devices on the source's current stream, with a barrier against the destination's: on the default
        # streams the copy would stand in the queues of both models.
        with torch.cuda.stream(self._in), torch.cuda.stream(self._out):
            if after is not None:
                self._out.wait_event(after)
            copy = torch.empty_like(tensor, device=self._destination)
            copy.copy_(tensor, non_blocking=True)
            done = _mark_of(self._out)
        _wait(done)
        return _for_drafter(copy, self._destination)


class Staged:
    """GPU to GPU through two pinned host buffers; on host memory the same without streams.

    The threads of one target share the buffers: one carries at a time.
    """

    def __init__(self, source: torch.device, destination: torch.device, *, buffer_bytes: int) -> None:
        self._source, self._destination = source, destination
        cuda = source.type == "cuda"
        self._buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
        self._out = torch.cuda.Stream(source) if cuda else None  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(destination) if cuda else None  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()

    def computing(self) -> AbstractContextManager[object]:
        """The source, as current device."""
        return nullcontext() if self._out is None else torch.cuda.device(self._source)

    def mark(self) -> Mark:
        """Behind the work on the source's current stream."""
        return None if self._out is None else _mark_of(torch.cuda.current_stream(self._source))

    def carry(self, tensor: torch.Tensor, *, after: Mark) -> torch.Tensor:
        """A complete copy on the destination."""
        if self._in is not None and tensor.device.type == "cpu":
            return _from_host(tensor, self._destination, self._in)
        with self._lock:
            with torch.cuda.stream(self._out):
                if self._out is not None and after is not None:
                    self._out.wait_event(after)
                tensor = tensor.contiguous()
            with torch.cuda.stream(self._in):
                copy = torch.empty_like(tensor, device=self._destination)
            from_bytes, to_bytes = tensor.view(-1).view(torch.uint8), copy.view(-1).view(torch.uint8)
            emptied: list[Mark] = [None, None]
            for number, (begin, end) in enumerate(chunks(len(from_bytes), size=len(self._buffers[0]))):
                emptied[number % 2] = self._carry_chunk(
                    from_bytes[begin:end], to_bytes[begin:end], self._buffers[number % 2], emptied[number % 2]
                )
            for event in emptied:
                _wait(event)
        return copy if self._in is None else _for_drafter(copy, self._destination)

    def _carry_chunk(self, chunk: torch.Tensor, place: torch.Tensor, buffer: torch.Tensor, emptied: Mark) -> Mark:
        """Through one buffer, once what it held has left it; returns the mark of its leaving."""
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
            return _mark_of(self._in)


def choose_courier(source: torch.device, destination: torch.device) -> Courier:
    """The best way between two devices that works."""
    if "cpu" in (source.type, destination.type):
        return Plain(destination)
    if source == destination:
        return Beside(source)
    if torch.cuda.can_device_access_peer(destination, source) and arrives(Peer(source, destination), source):
        logger.info("features go from %s to %s directly", source, destination)
        return Peer(source, destination)
    logger.info("features go from %s to %s through pinned host memory", source, destination)
    return Staged(source, destination, buffer_bytes=STAGING_BYTES)


def arrives(courier: Courier, source: torch.device) -> bool:
    """Whether a copy of known numbers is the same when it has arrived."""
    with courier.computing():
        sent = torch.arange(_PROBE_NUMBERS, dtype=torch.int32, device=source)
        made = courier.mark()
    return torch.equal(courier.carry(sent, after=made).cpu(), sent.cpu())


def chunks(total: int, *, size: int) -> Iterator[tuple[int, int]]:
    """[begin, end) stretches of at most `size` that cover `total`."""
    return ((begin, min(begin + size, total)) for begin in range(0, total, size))


def _mark_of(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event behind everything on a stream; whoever waits for it sleeps."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _wait(mark: Mark) -> None:
    if mark is not None:
        mark.synchronize()


def _for_drafter(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Made on another stream, used on the drafter's: the allocator must not give its memory away before that is done with it."""
    tensor.record_stream(torch.cuda.default_stream(device))
    return tensor


def _from_host(tensor: torch.Tensor, destination: torch.device, stream: torch.cuda.Stream) -> torch.Tensor:
    """From pageable memory: such a copy waits for its stream, which on the drafter's own would be the whole step."""
    with torch.cuda.stream(stream):
        copy = tensor.to(destination)
    return _for_drafter(copy, destination)
