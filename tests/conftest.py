"""What all tests share: `full` tests run with `make test-full` alone, and the price of starting is paid once.

Tests marked `full` start many processes each, or try again what a cheaper test has tried.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.support.amount import FULL
from tests.support.components import COMPONENTS

FLOWS = "tests/flows/"

# Imports make millions of objects that stay: looking through them for garbage, now or later, is a tenth of all time.
gc.disable()
RARELY = (5000, 20, 100)
"""Thresholds of the collector: with Python's own it takes a twelfth of all time."""
MANY_MODULES = 100
MODULES_FROZEN = pytest.StashKey[int]()


class FilesAndFlows(LoadFileScheduling):
    """A file is one process's, and so are all flow tests: they share a Prefect server, which no other process then has to start."""

    def _split_scope(self, nodeid: str) -> str:
        return FLOWS if nodeid.startswith(FLOWS) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Takes the place of `--dist loadfile`."""
    return FilesAndFlows(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """From here on garbage is collected as usual, but never looked for among what was imported."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(*RARELY)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What the tests before have imported is left out, too."""
    known = item.config.stash.get(MODULES_FROZEN, 0)
    if len(sys.modules) > known + MANY_MODULES:
        item.config.stash[MODULES_FROZEN] = len(sys.modules)
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the components, and skip the long tests unless DFLASH_FULL is set."""
    for item in items:
        if item.path.stem in COMPONENTS:
            item.add_marker(pytest.mark.component)
    if FULL:
        return
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="a long test: make test-full"))


@pytest.fixture
def without_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Health pages are written as those of an empty log (pictures are nine tenths of a check), but in tests marked `draws`."""
    if not request.node.get_closest_marker("draws"):
        from dflash.health.pictures import Pictures

        monkeypatch.setattr("dflash.health.report.draw_pictures", lambda _history, _findings: Pictures((), (), ()))


@pytest.fixture(autouse=True)
def _the_same_random_tensors() -> None:
    """Tensors that a test draws without a generator are the same in every run: a tolerance holds always or never."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
