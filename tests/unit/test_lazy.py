"""Names of a package that come with their first use."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

INIT = """
from dflash.lazy import import_on_use
__getattr__ = import_on_use(__name__, {"answer": "heavy"})
"""


def test_a_name_is_imported_when_it_is_first_used_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lazy_package").mkdir()
    (tmp_path / "lazy_package" / "__init__.py").write_text(INIT)
    (tmp_path / "lazy_package" / "heavy.py").write_text("answer = object()\n")
    monkeypatch.syspath_prepend(tmp_path)
    package = importlib.import_module("lazy_package")
    assert "lazy_package.heavy" not in sys.modules
    with pytest.raises(AttributeError, match="'lazy_package' has no attribute 'question'"):
        _ = package.question
    assert "answer" not in vars(package)
    assert package.answer is importlib.import_module("lazy_package.heavy").answer
    assert vars(package)["answer"] is package.answer
