"""The schedule of a drill's health checks, on a real server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from prefect import get_client
from prefect.settings import get_current_settings

from flows.health import health_check
from flows.train import train
from tasks import drill_prefect
from tasks.drill_prefect import PrefectStage
from tasks.drill_stack import DrillStack, client_of

pytestmark = pytest.mark.usefixtures("prefect_server")

NAME = "drilled"


class DrillKilledError(Exception):
    """Stands for SIGKILL: nothing is done on the way out."""


def test_a_drill_ends_the_schedule_of_one_that_was_killed_and_at_last_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drill_prefect, "DEPLOYMENT", NAME)
    with get_client(sync_client=True) as client:
        for flow in (train, health_check):
            client.create_deployment(client.create_flow(flow), name=NAME)
    api_url = str(get_current_settings().api.url)
    stack = DrillStack(tmp_path, dict(os.environ) | {"PREFECT_API_URL": api_url})

    def slugs(client: Any) -> list[str]:
        return [str(schedule.slug) for schedule in client.read_deployment_by_name(f"health-check/{NAME}").schedules]

    with client_of(stack) as client:
        stage = PrefectStage(stack, client, config="configs/drill.yaml", overrides=["run.name=a"])
        with monkeypatch.context() as killed:
            killed.setattr(PrefectStage, "_forget", lambda *_arguments: None)
            with pytest.raises(DrillKilledError), stage.health_checks(every_s=3600):
                raise DrillKilledError
        (left,) = slugs(client)
        with stage.health_checks(every_s=3600):
            (own,) = slugs(client)
            assert own != left
        assert slugs(client) == []
