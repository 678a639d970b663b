"""Artifacts in Prefect that a stage leaves behind.

Invariant: reporting never stops a stage: a Prefect server that is away costs a warning, the stage's result stands.
"""

from __future__ import annotations

import base64
import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact

logger = logging.getLogger(__name__)

MOST_SHOWN_BYTES = 400_000
"""Larger pictures would burden the server's database with every look at the flow run."""


def markdown(key: str, text: str, *, description: str) -> None:
    """Leave a Markdown artifact."""
    with tolerated(f"artifact {key}", level=logging.WARNING):
        create_markdown_artifact(text, key=key, description=description)


def link(key: str, address: str, *, description: str) -> None:
    """Leave a link to a local file or to an address."""
    url = address if "://" in address else Path(address).as_uri()
    with tolerated(f"artifact {key}", level=logging.WARNING):
        create_link_artifact(url, link_text=address, key=key, description=description)


def picture(key: str, png: bytes, *, kept_in: str, description: str) -> None:
    """Leave a picture inside a Markdown artifact, so that it is seen without access to the run's folder; a large one is named."""
    shown = f"![{description}](data:image/png;base64,{base64.b64encode(png).decode()})\n\n" if len(png) <= MOST_SHOWN_BYTES else ""
    markdown(key, f"{shown}`{kept_in}`\n", description=description)


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
