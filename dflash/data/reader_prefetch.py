"""Work done ahead by threads, delivered in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def prefetch(
    items: Iterable[ItemT], work: Callable[[ItemT], ResultT], *, threads: int, ahead: int
) -> Generator[ResultT, None, None]:
    """Results of `work` in the order of the items, each exactly once.

    Nothing starts before the first result is asked for. Closing the generator (or an error) drops what has not begun, waits
    for what has, and leaves no thread behind.

    Args:
        items: taken by the consumer's thread.
        work: called by any of the threads.
        threads: how many work at once.
        ahead: results in work or waiting besides the one that the consumer has; 0 works in the consumer's thread.

    Raises:
        BaseException: what `work` raised for an item, after the results of all items before it.
    """
    if not ahead:
        yield from map(work, items)
        return
    source = iter(items)
    waiting: deque[Future[ResultT]] = deque()
    with ThreadPoolExecutor(min(threads, ahead), thread_name_prefix="read-ahead") as pool:
        try:
            waiting.extend(pool.submit(work, item) for item in islice(source, ahead))
            while waiting:
                result = waiting.popleft().result()
                waiting.extend(pool.submit(work, item) for item in islice(source, 1))
                yield result
                del result  # the consumer's memory, not this window's
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
