"""A flow that builds one data set over a cluster's workers; importable, because workers are sent the flow with each piece."""

from __future__ import annotations

from prefect import flow

from dflash.config import Config
from dflash.data.prepare import PreparedData
from dflash.data.sources import Progress
from dflash.stages import build_spread
from tasks.spread import open_spread

_wanted: list[tuple[Config, Progress]] = []
"""Not the flow's parameters: those travel to the workers, and a test's progress cannot."""


def build(settings: Config, progress: Progress) -> PreparedData:
    """Build a data set inside a flow run of its own."""
    _wanted.append((settings, progress))
    try:
        return build_wanted()
    finally:
        _wanted.pop()


@flow(name="build-data-set", persist_result=False)
def build_wanted() -> PreparedData:
    return _build()


def _build() -> PreparedData:
    settings, progress = _wanted[-1]
    with open_spread(settings.data) as spread:
        return build_spread(settings, spread=spread, progress=progress)
