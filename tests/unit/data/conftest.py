"""Fixtures of the data room's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from workshop import TOKENIZER, Workshop


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    """A fresh folder with a saved toy target."""
    TOKENIZER.save_pretrained(str(tmp_path / "target"))
    return Workshop(tmp_path, tmp_path / "target")
