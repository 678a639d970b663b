"""What `make test-unit` leaves out is there, once."""

from __future__ import annotations

from pathlib import Path

from tests.support.components import COMPONENTS, DATABASES, MODELS, PROCESSES

UNIT = Path(__file__).parent


def test_every_component_is_one_file() -> None:
    found = [file.stem for file in UNIT.rglob("test_*.py") if file.stem in COMPONENTS]
    assert sorted(found) == sorted(COMPONENTS)
    assert len(COMPONENTS) == len(MODELS) + len(PROCESSES) + len(DATABASES)


def test_most_tests_are_no_components() -> None:
    files = list(UNIT.rglob("test_*.py"))
    assert len(COMPONENTS) < len(files) / 4
