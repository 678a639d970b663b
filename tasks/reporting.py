"""Artifacts in Prefect that a stage leaves behind.

Invariant: reporting never stops a stage: a Prefect server that is away costs a warning, the stage's result stands.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact

logger = logging.getLogger(__name__)


def markdown(key: str, text: str, *, description: str) -> None:
    """Leave a Markdown artifact."""
    with tolerated(f"artifact {key}", level=logging.WARNING):
        create_markdown_artifact(text, key=key, description=description)


def table(key: str, rows: Sequence[dict[str, Any]], *, description: str) -> None:
    """Leave a table artifact, one dictionary a row."""
    with tolerated(f"artifact {key}", level=logging.WARNING):
        create_table_artifact(list(rows), key=key, description=description)


@contextlib.contextmanager
def tolerated(what: str, *, level: int) -> Iterator[None]:
    """Log a failure to store `what` in Prefect instead of raising it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever Prefect's client raises, reporting must not stop the work
        logger.log(level, "%s could not be stored in Prefect: %s: %s", what, type(error).__name__, error)
