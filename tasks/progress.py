"""Progress of a stage: plain lines in the log every few seconds, a progress artifact in Prefect every ten.

Invariant: a report returns at once. Prefect's client may try for a minute to reach a server that is away, and the caller
is the loop that supervises the trainer; so a thread that only knows the newest value does the sending.
Lines hold no control characters: they read the same on a terminal, in a file and in the UI.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from types import TracebackType
from typing import Self, cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact

from dflash.stages.eta import TimeLeft
from tasks.reporting import tolerated

logger = logging.getLogger(__name__)

LINE_EVERY_S = 5.0
ARTIFACT_EVERY_S = 10.0
LAST_UPDATE_S = 10.0
"""How long the end of a stage waits for its last progress to be stored."""


class ProgressReport:
    """A context manager that is called as `report(label, done, total)`, which is what the library's stages want.

    Args:
        key: key of the artifact, lower-case with dashes.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._artifact: UUID | None = None
        self._newest: tuple[float, str] | None = None
        self._begun, self._closing, self._away = threading.Event(), threading.Event(), False
        self._line_s, self._label, self._done = 0.0, "", 0
        self._left = TimeLeft()
        # The thread runs in a copy of this context, so that Prefect knows which task run the artifact belongs to.
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(self._send,), name=key, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closing.set()
        self._begun.set()
        self._thread.join(LAST_UPDATE_S)

    def __call__(self, label: str, done: int, total: int) -> None:
        """Report `done` of `total`."""
        self.show(label, done, total, detail="")

    def show(self, label: str, done: int, total: int, *, detail: str) -> None:
        """Report `done` of `total`; a line shows `detail`, if there is one, instead of the percentage and the time left."""
        percent = min(100.0, 100.0 * done / max(1, total))
        now_s, new = time.monotonic(), label != self._label
        ended = done >= total and (new or self._done < total)
        left = self._left.text(label, done, total, now_s=now_s)
        if new or ended or (done != self._done and now_s - self._line_s >= LINE_EVERY_S):
            logger.info("%-18s %s/%s  %s", label, done, total, detail or f"{percent:.0f} % {left}".strip())
            self._line_s = now_s
        self._label, self._done = label, done
        self._newest = (percent, f"{label}: {done}/{total} {detail or left}".strip())
        self._begun.set()

    def _send(self) -> None:
        """Store the newest value now, then every ARTIFACT_EVERY_S if it has changed, and once more at the end."""
        sent: tuple[float, str] | None = None
        self._begun.wait()
        closing = False
        while True:
            newest = self._newest
            if newest is not None and newest != sent:
                self._store(*newest)
                sent = newest
            if closing:
                return
            closing = self._closing.wait(ARTIFACT_EVERY_S)

    def _store(self, percent: float, description: str) -> None:
        with tolerated(f"artifact {self._key}", level=logging.DEBUG if self._away else logging.WARNING):
            self._away = True
            if self._artifact is None:
                created = create_progress_artifact(progress=percent, key=self._key, description=description)
                self._artifact = cast("UUID", created)  # a coroutine only where an event loop runs, which this thread has not
            else:
                update_progress_artifact(artifact_id=self._artifact, progress=percent, description=description)
            self._away = False
