"""Tests marked `full` start many processes each: they run with `make test-full` alone."""

from __future__ import annotations

import os
import sys

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the long tests unless DFLASH_FULL is set."""
    if os.environ.get("DFLASH_FULL"):
        return
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="a long test: make test-full"))


@pytest.fixture(autouse=True)
def _the_same_random_tensors() -> None:
    """Tensors that a test draws without a generator are the same in every run: a tolerance holds always or never."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
