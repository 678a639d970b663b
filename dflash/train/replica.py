"""One replica's supply of features: reader threads -> ready queue -> target threads -> reorder window.

Invariant: the consumer sees the batches in plan order, each exactly once, whatever the number of targets and their
speeds: a free target claims the next batch, so a slow one never unbalances the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any, Generic, Protocol, TypeVar

from dflash.config import QueueConfig
from dflash.train.balance import StageTime
from dflash.train.pipeline import Pipeline
from dflash.train.queues import ByteQueue, PipelineStopped, QueueClosed, ReorderWindow


class Sized(Protocol):
    """Something that knows its memory."""

    @property
    def nbytes(self) -> int:
        """Bytes."""


BatchT = TypeVar("BatchT", bound=Sized)
FeaturesT = TypeVar("FeaturesT", bound=Sized)


class FeatureSupply(Generic[BatchT, FeaturesT]):
    """Reads, runs the targets and hands out features in order.

    Args:
        batches: collated batches in consumption order; taken by the reader thread, and closed by it.
        makers: one function a target, batch -> features.
        threads: of each target; with several, one computes while the others carry features to the drafter.
        queues: byte bounds.
    """

    def __init__(
        self,
        batches: Generator[BatchT, None, None],
        *,
        makers: Sequence[Callable[[BatchT], FeaturesT]],
        threads: int,
        queues: QueueConfig,
    ) -> None:
        self._batches = batches
        self._makers = makers
        self._ready: ByteQueue[tuple[int, BatchT]] = ByteQueue(limit_bytes=queues.ready_bytes)
        self._window: ReorderWindow[FeaturesT] = ReorderWindow(limit_bytes=queues.feature_bytes, first=0)
        self._finished = [0] * len(makers)
        self._busy_s = [0.0] * len(makers)
        self._reading_s = 0.0
        self._threads = threads
        self._active = threads * len(makers)
        self._lock = threading.Lock()
        self.pipeline = Pipeline([self._ready, self._window])

    @property
    def depths(self) -> tuple[int, int]:
        """Batches waiting for a target, and features waiting for the drafter."""
        return len(self._ready), len(self._window)

    @property
    def finished(self) -> tuple[int, ...]:
        """Batches finished by each target worker."""
        return tuple(self._finished)

    @property
    def counters(self) -> dict[str, dict[str, Any]]:
        """Waiting on both sides of both queues."""
        return {"ready": asdict(self._ready.counters), "features": asdict(self._window.counters)}

    @property
    def stage_times(self) -> tuple[StageTime, StageTime]:
        """What the reader and the targets did with their time up to now."""
        ready, features = self._ready.counters, self._window.counters
        return (
            StageTime(workers=1, busy_s=self._reading_s, starved_s=0.0, blocked_s=ready.blocked_s),
            # Threads of one target overlap: together they are one worker.
            StageTime(
                workers=len(self._makers),
                busy_s=sum(self._busy_s) / self._threads,
                starved_s=ready.starved_s / self._threads,
                blocked_s=features.blocked_s / self._threads,
            ),
        )

    def start(self) -> None:
        """Start the reader and the target workers."""
        self.pipeline.start("reader", self._run_reader)
        for index in range(len(self._makers)):
            for number in range(self._threads):
                self.pipeline.start(f"target-{index}.{number}", lambda index=index: self._run_target(index))  # type: ignore[misc]

    def next(self) -> tuple[FeaturesT, float]:
        """The next batch's features, and the seconds spent waiting for them.

        Raises:
            QueueClosed: every batch was handed out.
            BaseException: the error of the stage that failed, with its own traceback.
        """
        begin_s = time.monotonic()
        try:
            features = self._window.get()
        except PipelineStopped:
            self.pipeline.raise_error()
            raise
        return features, time.monotonic() - begin_s

    def shut_down(self) -> None:
        """Stop all threads, whatever they are doing, and wait for them."""
        self.pipeline.shut_down()

    def _run_reader(self) -> None:
        with closing(self._batches) as batches:
            begin_s = time.monotonic()
            for number, batch in enumerate(batches):
                self._reading_s += time.monotonic() - begin_s
                self._ready.put((number, batch), nbytes=batch.nbytes)
                begin_s = time.monotonic()
        self._ready.close()

    def _run_target(self, index: int) -> None:
        while True:
            try:
                number, batch = self._ready.get()
            except QueueClosed:
                break
            begin_s = time.monotonic()
            features = self._makers[index](batch)
            spent_s = time.monotonic() - begin_s
            with self._lock:
                self._busy_s[index] += spent_s
            self._window.put(number, features, nbytes=features.nbytes)
            with self._lock:
                self._finished[index] += 1
        # Only a worker that ended well counts: after a failure the window must never look like a finished one.
        with self._lock:
            self._active -= 1
            last = self._active == 0
        if last:
            self._window.close()
