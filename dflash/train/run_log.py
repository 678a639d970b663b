r"""The run log's writer: one JSON object a line, appended by its own thread.

Invariants: a line is one `write` on a file opened for appending, so a reader never sees two lines mixed; history is
never truncated, and a line torn by a kill stays one torn line because the next writer starts with `\n`.
The trainer never waits for the disk: the queue is bounded, a step record that finds it full is dropped, counted and
reported as a `log_drops` event. Events are few and are never dropped. `sync` is the barrier that a checkpoint needs:
its step's records are on disk before it is.
A full disk stops nobody: what could not be written waits in the queue and is tried again until it can be. While nothing
happens a `heartbeat` tells that the process lives and that only its steps are slow.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dflash.records import EventName, EventRecord, StepRecord, to_json
from dflash.storage import append_line, fsync_dir

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_TRIES_AT_THE_END = 5
"""A log that cannot be written when its segment ends is given up after as many tries."""


class RunLog:
    """Appends the records of one segment."""

    def __init__(
        self,
        path: Path,
        *,
        segment: int,
        capacity_records: int,
        heartbeat_s: float,
        on_defect: Callable[[BaseException], None],
    ) -> None:
        """Open (or create) the log and start the thread; `on_defect` gets an error of the thread."""
        self.segment = segment
        self._capacity = capacity_records
        self._heartbeat_s = heartbeat_s
        self._on_defect = on_defect
        self._last_step = 0
        self._stuck: OSError | None = None
        self._tries_begun = self._tries_ended = 0
        self._retry_now = False
        self._torn = False
        self._waiting: deque[StepRecord | EventRecord] = deque()
        self._dropped: list[int] = []
        self._appended = self._written = self._synced = 0
        self._sync_wanted = 0
        self._closing = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._descriptor = _open_for_append(path)
        self._thread = threading.Thread(target=self._guarded, name="log-writer", daemon=True)
        self._thread.start()

    def step(self, record: StepRecord) -> None:
        """Append a step record without waiting; drop and count it if the queue is full."""
        with self._changed:
            if len(self._waiting) >= self._capacity:
                self._dropped.append(record.step)
                return
            self._append(record)

    def event(self, name: EventName, step: int, details: Mapping[str, Any]) -> None:
        """Append an event without waiting."""
        with self._changed:
            self._append(self._event(name, step, details))

    def sync(self) -> None:
        """Wait until everything appended so far is on disk.

        Raises:
            OSError: the log cannot be written now.
        """
        with self._changed:
            wanted, next_try = self._appended, self._tries_begun + 1
            self._sync_wanted = max(self._sync_wanted, wanted)
            self._retry_now = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: (
                    self._synced >= wanted or self._error is not None or (self._stuck is not None and self._tries_ended >= next_try)
                )
            )
            if self._synced < wanted:
                problem = self._error or self._stuck
                raise OSError(f"the run log cannot be written: {problem}") from problem

    def close(self) -> None:
        """Write and sync what is left, then end the thread."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        os.close(self._descriptor)

    def _append(self, record: StepRecord | EventRecord) -> None:
        self._waiting.append(record)
        self._appended += 1
        self._last_step = record.step
        self._changed.notify_all()

    def _event(self, name: EventName, step: int, details: Mapping[str, Any]) -> EventRecord:
        return EventRecord(
            segment=self.segment,
            step=step,
            wall_time_s=time.time(),
            mono_time_s=time.monotonic(),
            event=name,
            details=details,
        )

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - handed to the replica, which stops and raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()
            self._on_defect(error)

    def _run(self) -> None:
        tries_left = _TRIES_AT_THE_END
        while True:
            with self._changed:
                if not self._changed.wait_for(self._has_work, timeout=self._heartbeat_s):
                    self._append(self._event("heartbeat", self._last_step, {}))
                self._append_drops()
                batch, ending = list(self._waiting), self._closing
                self._waiting.clear()
                sync = ending or self._sync_wanted > self._synced
                self._tries_begun += 1
                self._retry_now = False
            written, problem = self._write(batch, sync=sync)
            with self._changed:
                self._waiting.extendleft(reversed(batch[written:]))
                self._note(written, synced=sync and problem is None, problem=problem)
                if problem is None:
                    if ending and not self._waiting:
                        return
                    continue
                if ending:
                    tries_left -= 1
                    if tries_left == 0:
                        raise problem
                self._changed.wait_for(lambda: self._retry_now or (self._closing and not ending), timeout=_RETRY_S)  # noqa: B023

    def _has_work(self) -> bool:
        return bool(self._waiting) or self._closing or self._sync_wanted > self._synced

    def _append_drops(self) -> None:
        if self._dropped:
            details = {"dropped": len(self._dropped), "first_step": self._dropped[0], "last_step": self._dropped[-1]}
            self._append(self._event("log_drops", self._dropped[-1], details))
            self._dropped = []

    def _write(self, batch: list[StepRecord | EventRecord], *, sync: bool) -> tuple[int, OSError | None]:
        """Write what can be written; returns how many records are out, and what stopped the next one."""
        written = 0
        try:
            for record in batch:
                _write_line(self._descriptor, to_json(record), after_torn=self._torn)
                self._torn = False
                written += 1
            if sync:
                os.fsync(self._descriptor)
        except OSError as error:
            self._torn = self._torn or written < len(batch)
            return written, error
        return written, None

    def _note(self, written: int, *, synced: bool, problem: OSError | None) -> None:
        self._written += written
        if synced:
            self._synced = self._written
        if problem is not None and self._stuck is None:
            logger.error("the run log cannot be written, its records wait: %s", problem)
        self._stuck = problem
        self._tries_ended += 1
        self._changed.notify_all()


def append_event(path: Path, event: EventRecord) -> None:
    """Append one event durably from outside a trainer; one that writes meanwhile writes whole lines too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, to_json(event))


def _open_for_append(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    created = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    if created:
        fsync_dir(path.parent)
    size_bytes = os.fstat(descriptor).st_size
    if size_bytes and os.pread(descriptor, 1, size_bytes - 1) != b"\n":
        os.write(descriptor, b"\n")
    return descriptor


def _write_line(descriptor: int, text: str, *, after_torn: bool) -> None:
    line = memoryview((b"\n" if after_torn else b"") + text.encode() + b"\n")
    while line:
        line = line[os.write(descriptor, line) :]
