"""What all tests share: `full` tests run with `make test-full` alone, and the price of starting is paid once.

Tests marked `full` start many processes each, or try again what a cheaper test has tried.
"""

from __future__ import annotations

import gc
import sys

import pytest

from tests.support.amount import FULL

# Imports make millions of objects that stay: looking through them for garbage, now or later, is a tenth of all time.
gc.disable()


def pytest_collection_finish() -> None:
    """From here on garbage is collected as usual, but never looked for among what was imported."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the long tests unless DFLASH_FULL is set."""
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
