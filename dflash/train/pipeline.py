"""Threads of a replica: start, fail together, end together.

Invariant: the first error of any stage is the one that the replica raises, with its own traceback; every other stage
is woken and ends. Nothing is restarted inside a process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from dflash.train.queues import PipelineStopped, QueueClosed

logger = logging.getLogger(__name__)


class Stoppable(Protocol):
    """A channel that wakes its users when the replica stops."""

    def fail(self) -> None:
        """Wake everyone."""


class Pipeline:
    """The threads between some channels."""

    def __init__(self, channels: Sequence[Stoppable]) -> None:
        self._channels = channels
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    @property
    def error(self) -> BaseException | None:
        """First error of a stage."""
        return self._error

    def start(self, name: str, run: Callable[[], None]) -> None:
        """Run a stage on its own thread; it ends by returning, by a closed channel, or by failing the pipeline."""
        thread = threading.Thread(target=self._guarded, args=(name, run), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def fail(self, error: BaseException) -> None:
        """Record the first error and stop every stage."""
        with self._lock:
            if self._error is None:
                self._error = error
        self._stop()

    def raise_error(self) -> None:
        """Raise the first error of a stage, if there was one."""
        if self._error is not None:
            raise self._error

    def shut_down(self) -> None:
        """Stop every stage and wait for the threads."""
        self._stop()
        for thread in self._threads:
            thread.join()

    def _stop(self) -> None:
        for channel in self._channels:
            channel.fail()

    def _guarded(self, name: str, run: Callable[[], None]) -> None:
        try:
            run()
        except (QueueClosed, PipelineStopped):
            return
        except BaseException as error:  # noqa: BLE001 - raised again by the main thread
            logger.error("stage %s failed: %r", name, error)
            self.fail(error)
