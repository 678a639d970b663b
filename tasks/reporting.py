"""Artifacts and progress in Prefect, and the same progress as plain lines in the log.

Invariant: reporting never stops a stage. A Prefect server that is away costs one warning; the work goes on.
Lines hold no control characters, so they read the same on a terminal, in a file and in the UI.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

logger = logging.getLogger(__name__)

LINE_EVERY_S = 5.0
ARTIFACT_EVERY_S = 10.0


def markdown(key: str, text: str, *, description: str) -> None:
    """Leave a Markdown artifact."""
    with _reporting(f"artifact {key}", level=logging.WARNING):
        create_markdown_artifact(text, key=key, description=description)


def table(key: str, rows: Sequence[dict[str, Any]], *, description: str) -> None:
    """Leave a table artifact, one dictionary a row."""
    with _reporting(f"artifact {key}", level=logging.WARNING):
        create_table_artifact(list(rows), key=key, description=description)


class ProgressReport:
    """Progress of one stage: a log line every few seconds, a progress artifact every ten.

    Called as `report(label, done, total)`, which is what the library's stages want.

    Args:
        key: key of the artifact, lower-case with dashes.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._artifact: UUID | None = None
        self._last_line_s = -LINE_EVERY_S
        self._last_artifact_s = -ARTIFACT_EVERY_S
        self._last_label = ""
        self._last_done = 0
        self._away = False

    def __call__(self, label: str, done: int, total: int) -> None:
        """Report `done` of `total`."""
        self.show(label, done, total, detail="")

    def show(self, label: str, done: int, total: int, *, detail: str) -> None:
        """Report `done` of `total`; the first, the last and a new label are always shown."""
        percent = 100.0 * done / max(1, total)
        now_s = time.monotonic()
        new = label != self._last_label
        ended = done >= total and (new or self._last_done < total)
        if new or ended or (now_s - self._last_line_s >= LINE_EVERY_S and done != self._last_done):
            logger.info("%-18s %s/%s  %s", label, done, total, detail or f"{percent:.0f} %")
            self._last_line_s = now_s
        if ended or now_s - self._last_artifact_s >= ARTIFACT_EVERY_S:
            self._update(percent, f"{label}: {done}/{total} {detail}".strip())
            self._last_artifact_s = now_s
        self._last_label, self._last_done = label, done

    def _update(self, percent: float, description: str) -> None:
        with _reporting(f"artifact {self._key}", level=logging.DEBUG if self._away else logging.WARNING):
            self._away = True
            if self._artifact is None:
                created = create_progress_artifact(progress=percent, key=self._key, description=description)
                self._artifact = cast("UUID", created)  # a coroutine only where an event loop runs, which no stage does
            else:
                update_progress_artifact(artifact_id=self._artifact, progress=percent, description=description)
            self._away = False


@contextlib.contextmanager
def _reporting(what: str, *, level: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever Prefect's client raises, reporting must not stop the work
        logger.log(level, "%s could not be stored in Prefect: %s: %s", what, type(error).__name__, error)
