"""Queues between the stages of a replica: bounded in bytes, closable, and unable to hang a replica that failed.

Invariants: what is held never exceeds the bound except by one item (an item larger than the bound must still pass;
in the reorder window the next expected one must always be admitted, or the consumer would wait for it forever);
after `fail` every blocked and every later call raises `PipelineStopped`.
Counters are seconds and events of waiting on either side: they tell which side of a queue starves.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class QueueClosed(Exception):  # noqa: N818 - an end of stream, not an error
    """The producers are done and everything was taken."""


class PipelineStopped(Exception):  # noqa: N818 - the failing stage's own error is the one to look at
    """The replica is stopping because a stage failed or the consumer left."""


@dataclass(slots=True)
class QueueCounters:
    """Waiting on both sides of a queue.

    Attributes:
        blocked_puts, blocked_s: producers that found no room.
        starved_gets, starved_s: consumers that found nothing.
        peak_bytes: most bytes held at once.

    """

    puts: int = 0
    gets: int = 0
    blocked_puts: int = 0
    blocked_s: float = 0.0
    starved_gets: int = 0
    starved_s: float = 0.0
    peak_bytes: int = 0


class _Channel(Generic[ItemT]):
    """What both queues share: one lock, byte accounting, close and fail."""

    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._changed = threading.Condition()
        self._closed = False
        self._stopped = False
        self.counters = QueueCounters()

    def close(self) -> None:
        """No more puts; gets drain what is held and then raise `QueueClosed`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def fail(self) -> None:
        """Wake everyone; every call raises `PipelineStopped` from now on."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _wait_for_room(self, has_room: Callable[[], bool]) -> None:
        self._check_stopped()
        if not has_room():
            begin_s = time.monotonic()
            self._changed.wait_for(lambda: has_room() or self._stopped)
            self.counters.blocked_puts += 1
            self.counters.blocked_s += time.monotonic() - begin_s
            self._check_stopped()

    def _wait_for_item(self, has_item: Callable[[], bool]) -> None:
        self._check_stopped()
        if not has_item():
            begin_s = time.monotonic()
            self._changed.wait_for(lambda: has_item() or self._closed or self._stopped)
            self.counters.starved_gets += 1
            self.counters.starved_s += time.monotonic() - begin_s
            self._check_stopped()
            if not has_item():
                raise QueueClosed

    def _account(self, nbytes: int) -> None:
        self._held_bytes += nbytes
        self.counters.peak_bytes = max(self.counters.peak_bytes, self._held_bytes)
        self._changed.notify_all()

    def _check_stopped(self) -> None:
        if self._stopped:
            raise PipelineStopped


class ByteQueue(_Channel[ItemT]):
    """First in, first out, any number of producers and consumers."""

    def __init__(self, *, limit_bytes: int) -> None:
        super().__init__(limit_bytes=limit_bytes)
        self._items: deque[tuple[ItemT, int]] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: ItemT, *, nbytes: int) -> None:
        """Append an item of `nbytes`, waiting for room; one larger than the bound passes alone.

        Raises:
            PipelineStopped: the replica stops.
        """
        with self._changed:
            self._wait_for_room(lambda: not self._items or self._held_bytes + nbytes <= self._limit_bytes)
            self._items.append((item, nbytes))
            self.counters.puts += 1
            self._account(nbytes)

    def get(self) -> ItemT:
        """Take the oldest item, waiting for one.

        Raises:
            QueueClosed: nothing is left and nothing will come.
            PipelineStopped: the replica stops.
        """
        with self._changed:
            self._wait_for_item(lambda: bool(self._items))
            item, nbytes = self._items.popleft()
            self.counters.gets += 1
            self._account(-nbytes)
            return item


class ReorderWindow(_Channel[ItemT]):
    """Takes numbered items in any order from any number of producers and gives them back in order."""

    def __init__(self, *, limit_bytes: int, first: int) -> None:
        """Expect the numbers `first`, `first` + 1, ... each once."""
        super().__init__(limit_bytes=limit_bytes)
        self._next = first
        self._items: dict[int, tuple[ItemT, int]] = {}

    def __len__(self) -> int:
        return len(self._items)

    def put(self, number: int, item: ItemT, *, nbytes: int) -> None:
        """Hold an item until its turn, waiting for room unless it is the next one.

        Raises:
            PipelineStopped: the replica stops.
        """
        with self._changed:
            self._wait_for_room(lambda: number == self._next or self._held_bytes + nbytes <= self._limit_bytes)
            if number < self._next or number in self._items:
                raise RuntimeError(f"batch {number} came twice (next is {self._next})")
            self._items[number] = (item, nbytes)
            self.counters.puts += 1
            self._account(nbytes)

    def get(self) -> ItemT:
        """Take the next item in order, waiting for it.

        Raises:
            QueueClosed: nothing is left and nothing will come.
            PipelineStopped: the replica stops.
        """
        with self._changed:
            self._wait_for_item(lambda: self._next in self._items)
            item, nbytes = self._items.pop(self._next)
            self._next += 1
            self.counters.gets += 1
            self._account(-nbytes)
            return item
