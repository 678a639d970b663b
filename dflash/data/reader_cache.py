"""A cache bounded in bytes that threads share; what was not used for longest goes first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")


class ByteCache(Generic[ValueT]):
    """Least-recently-used values; together they never hold more than `limit_bytes`."""

    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._items: OrderedDict[Hashable, tuple[ValueT, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> ValueT | None:
        """The value of a key, if it is still held."""
        with self._lock:
            item = self._items.get(key)
            if item is None:
                return None
            self._items.move_to_end(key)
            return item[0]

    def put(self, key: Hashable, value: ValueT, *, nbytes: int) -> None:
        """Hold a value of `nbytes`; one larger than the bound is not held at all."""
        with self._lock:
            if key in self._items or nbytes > self._limit_bytes:
                return
            self._items[key] = (value, nbytes)
            self._held_bytes += nbytes
            while self._held_bytes > self._limit_bytes:
                _, (_, freed) = self._items.popitem(last=False)
                self._held_bytes -= freed
