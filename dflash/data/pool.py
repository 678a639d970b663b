"""Work spread over processes of this machine, its results in the order of the input.

Invariant: at most a few items a worker are under way, so memory does not grow with the input; the results are the same
whatever the number of workers (one runs in this process, without a pool).
However it ends (exhausted, closed early, an error here or there, Ctrl-C), no worker outlives the iteration; a worker whose
parent was killed ends itself.
Hard decision: processes are spawned, not forked: the parent has threads (the tokenizer's, a progress reporter's), and a
lock that another thread holds at the fork would never be released in the child. The price: a few seconds to start.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any, TypeVar

from dflash.errors import DataError

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
ArgumentT = TypeVar("ArgumentT")

_ITEMS_PER_WORKER = 3
"""Items under way for each worker: one at work, one that waits, one whose result waits for an earlier one."""

_work: list[Callable[[Any], Any]] = []
"""In a worker: the one function that it runs."""


def map_in_order(
    make: Callable[[ArgumentT], Callable[[ItemT], ResultT]], argument: ArgumentT, items: Iterable[ItemT], *, workers: int
) -> Iterator[ResultT]:
    """Apply `make(argument)` to every item.

    Args:
        make: builds the function, once in each worker; importable by name.
        argument: what it is built from; must be picklable.
        items: read as workers become free; each must be picklable.
        workers: processes; 1 runs everything in this one.

    Raises:
        DataError: a worker was killed.
        Exception: whatever the function raises, with the traceback of the worker.
    """
    if workers == 1:
        function = make(argument)
        with _heap_left_alone():
            for item in items:
                yield function(item)
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(make, argument),
    )
    under_way: deque[Future[ResultT]] = deque()
    try:
        for item in items:
            under_way.append(pool.submit(_run, item))
            if len(under_way) >= workers * _ITEMS_PER_WORKER:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a tokenizing process ended before its work was done: it was killed, or it could not start",
            remedy="look for an out-of-memory kill in the system's log; fewer data.workers need less memory, and the build "
            "goes on with the first file that is not finished",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _heap_left_alone() -> Iterator[None]:
    """Keep the garbage collector off the objects that are there now: the imports left far more of them than any batch makes."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _start_worker(make: Callable[[ArgumentT], Callable[[Any], Any]], argument: ArgumentT) -> None:
    # Ctrl-C reaches the whole group: the parent decides, and a worker ends when it is told to.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a process: the processes are the parallelism
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    _work[:] = [make(argument)]
    gc.freeze()  # the half million objects that the imports made live for ever: no collection need look at them


def _run(item: Any) -> Any:
    return _work[0](item)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
