"""What the processes of the pool's tests run; run as a script: a parent with two workers that never ends by itself."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dflash.data.pool import map_in_order
from dflash.data.quarantine import BadRowError


def doubling(offset: int) -> Callable[[int], tuple[int, int]]:
    return lambda item: (2 * item + offset, os.getpid())


def arrays(size: int) -> Callable[[int], Any]:
    return lambda item: np.full(size, item, np.int32)


def failing_at(number: int) -> Callable[[int], int]:
    def work(item: int) -> int:
        if item == number:
            raise BadRowError("empty", "no text", origin=f"file:{item}")
        return item

    return work


def dying_at(number: int) -> Callable[[int], int]:
    def work(item: int) -> int:
        if item == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    return work


def broken(_: object) -> Callable[[int], int]:
    raise RuntimeError("this worker cannot start")


def counted(items: Iterator[int], taken: list[int]) -> Iterator[int]:
    for item in items:
        taken.append(item)
        yield item


if __name__ == "__main__":
    for _, pid in map_in_order(doubling, 0, itertools.count(), workers=2):
        print(pid, flush=True)
        if len(sys.argv) > 1 and not sys.stdin.readline():
            break
