"""Artifacts in Prefect that a stage leaves behind.

Invariant: reporting neither stops nor holds a stage. What a server that is away cannot take is kept, and sent with the next
artifact that it takes or when the flow has done its work (`send_kept`); what it refuses costs a warning, and the stage's result
stands.
"""

from __future__ import annotations

import base64
import contextlib
import contextvars
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.settings import get_current_settings

from tasks.patience import is_there

logger = logging.getLogger(__name__)

_KEPT: list[tuple[str, contextvars.Context, Callable[[], object]]] = []

MOST_SHOWN_BYTES = 400_000
"""Larger pictures would burden the server's database with every look at the flow run."""


def markdown(key: str, text: str, *, description: str) -> None:
    """Leave a Markdown artifact."""
    _store(key, lambda: create_markdown_artifact(text, key=key, description=description))


def link(key: str, address: str, *, description: str) -> None:
    """Leave a link to a local file or to an address."""
    url = address if "://" in address else Path(address).as_uri()
    _store(key, lambda: create_link_artifact(url, link_text=address, key=key, description=description))


def picture(key: str, png: bytes, *, kept_in: str, description: str) -> None:
    """Leave a picture inside a Markdown artifact, so that it is seen without access to the run's folder; a large one is named."""
    shown = f"![{description}](data:image/png;base64,{base64.b64encode(png).decode()})\n\n" if len(png) <= MOST_SHOWN_BYTES else ""
    markdown(key, f"{shown}`{kept_in}`\n", description=description)


def table(key: str, rows: Sequence[dict[str, Any]], *, description: str) -> None:
    """Leave a table artifact, one dictionary a row."""
    kept = list(rows)
    _store(key, lambda: create_table_artifact(kept, key=key, description=description))


def send_kept() -> None:
    """Send what the server could not take while it was away, each as a part of the task that it came from."""
    while _KEPT:
        key, context, create = _KEPT.pop(0)
        context.run(_create, key, create)


def _store(key: str, create: Callable[[], object]) -> None:
    api_url = get_current_settings().api.url
    if api_url is None or is_there(api_url):
        send_kept()
        _create(key, create)
    else:
        logger.warning("artifact %s: the Prefect server is away; it is sent once the server takes one again", key)
        _KEPT.append((key, contextvars.copy_context(), create))


def _create(key: str, create: Callable[[], object]) -> None:
    with tolerated(f"artifact {key}", level=logging.WARNING):
        create()


@contextlib.contextmanager
def tolerated(what: str, *, level: int) -> Iterator[None]:
    """Log a failure to store `what` in Prefect instead of raising it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever Prefect's client raises, reporting must not stop the work
        logger.log(level, "%s could not be stored in Prefect: %s: %s", what, type(error).__name__, error)
