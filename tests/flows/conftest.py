"""A Prefect server with a database of its own for all flow tests, and stages that only record how they were called."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flows.fake_stages import FakeStages


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    # Brings the server's packages, seconds that only the process that runs these tests has to pay.
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A small valid configuration whose runs lie in the test's own folder."""
    file = tmp_path / "tiny.yaml"
    text = "target: {path: demo, mask_token: '<|mask|>'}\ndata: {num_conversations: 4}\n"
    text += f"run: {{name: tiny, root: {tmp_path / 'runs'}}}\n"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> FakeStages:
    """The library's stages replaced where the tasks call them."""
    fakes = FakeStages()
    for task, names in {
        "prepare_data": ("prepare_stage", "spread_stage", "open_spread"),
        "plan_batches": ("plan_stage", "view_plan"),
        "run_doctor": ("doctor_stage",),
        "train_drafter": ("train_stage",),
        "evaluate_drafter": ("open_bench", "evaluate_stage"),
        "check_health": ("health_stage",),
        "summarise_run": ("summarise_stage", "closing_text"),
    }.items():
        for name in names:
            monkeypatch.setattr(f"tasks.{task}.{name}", getattr(fakes, name))
    return fakes
