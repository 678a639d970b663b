r"""The run log's writer: one JSON object a line, appended by its own thread.

Invariants: a line is one `write` on a file opened for appending, so a reader never sees two lines mixed; history is
never truncated, and a line torn by a kill stays one torn line because the next writer starts with `\n`.
The trainer never waits for the disk: the queue is bounded, a step record that finds it full is dropped, counted and
reported as a `log_drops` event. Events are few and are never dropped. `sync` is the barrier that a checkpoint needs:
its step's records are on disk before it is.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dflash.records import EventName, EventRecord, StepRecord, to_json
from dflash.storage import fsync_dir


class RunLog:
    """Appends the records of one segment."""

    def __init__(self, path: Path, *, segment: int, capacity_records: int, on_defect: Callable[[BaseException], None]) -> None:
        """Open (or create) the log and start the thread; `on_defect` gets an error of the thread."""
        self.segment = segment
        self._capacity = capacity_records
        self._on_defect = on_defect
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
            OSError: the log could not be written.
        """
        with self._changed:
            wanted = self._appended
            self._sync_wanted = max(self._sync_wanted, wanted)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._synced >= wanted or self._error is not None)
            if self._error is not None and self._synced < wanted:
                raise OSError(f"the run log could not be written: {self._error}") from self._error

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
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._closing or self._sync_wanted > self._synced)
                batch, done = list(self._waiting), self._closing and not self._waiting
                self._waiting.clear()
                dropped, self._dropped = self._dropped, []
                sync = done or self._sync_wanted > self._synced
            for record in batch:
                _write_line(self._descriptor, to_json(record))
            if dropped:
                details = {"dropped": len(dropped), "first_step": dropped[0], "last_step": dropped[-1]}
                _write_line(self._descriptor, to_json(self._event("log_drops", dropped[-1], details)))
            if sync:
                os.fsync(self._descriptor)
            with self._changed:
                self._written += len(batch)
                if sync:
                    self._synced = self._written
                self._changed.notify_all()
            if done:
                return


def append_event(path: Path, event: EventRecord) -> None:
    """Append one event durably from outside a trainer, while none writes."""
    descriptor = _open_for_append(path)
    try:
        _write_line(descriptor, to_json(event))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def _write_line(descriptor: int, text: str) -> None:
    line = memoryview(text.encode() + b"\n")
    while line:
        line = line[os.write(descriptor, line) :]
