"""Task: one piece of a data set, in the process of a Dask or Ray worker.

A module of its own, because a worker imports it, and what it imports (no torch, no training) is most of a worker's start.
"""

from __future__ import annotations

import gc
import logging
import time
from functools import cache
from typing import Any

from prefect import task

from dflash.data.work import Work
from tasks.local import plain_console
from tasks.policies import NEVER_CACHED, is_transient, let_library_log

logger = logging.getLogger(__name__)

LINE_EVERY_S = 10.0


@task(
    name="data-piece",
    task_run_name="{name}",
    retries=2,
    retry_delay_seconds=10,
    retry_condition_fn=is_transient,
    **NEVER_CACHED,
)
def carry_out(name: str, work: Work[Any]) -> Any:
    """Do one piece of work; the whole data set has a time limit, a piece of it has none."""
    _begin()
    return work.run(progress=PieceLog(name))


@cache
def _begin() -> None:
    """Once in a worker, whatever it does first."""
    plain_console()
    let_library_log()
    # What is imported stays to the end. Collecting it at exit takes seconds, and an engine kills a worker that does not end.
    gc.freeze()


class PieceLog:
    """Lines in the log of a piece that takes long; the builder shows the progress of the whole.

    Args:
        name: of the piece.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._line_s = time.monotonic()

    def __call__(self, label: str, done: int, total: int) -> None:
        """Report `done` of `total`, at most every LINE_EVERY_S."""
        now_s = time.monotonic()
        if now_s - self._line_s >= LINE_EVERY_S:
            self._line_s = now_s
            logger.info("%s: %s %d/%d", self._name, label, done, total)
