"""The soak at its full length, with the long tests: 50 rollbacks of one run and 2000 health checks leave nothing behind."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from benchmarks import soak


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_memory_and_descriptors_are_flat_over_a_day_of_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: dict[str, Any] = {}
    monkeypatch.setattr(sys, "argv", ["soak.py"])
    monkeypatch.setattr(soak, "publish", lambda _name, found, _arguments: figures.update(found))
    code = soak.main()
    assert (figures["bad_batches_trained_on"], figures["damaged_live_records"]) == (0, 0)
    assert figures["last_verdict"] in ("healthy", "watch"), "a busy machine has slow saves, which are worth a look and no damage"
    assert figures["rollbacks"] >= soak.ROLLBACKS and figures["health_checks"] >= soak.CHECKS, figures
    assert figures["checkpoints"] >= 200, figures
    assert code == 0, f"memory or file descriptors grow: {figures}"
