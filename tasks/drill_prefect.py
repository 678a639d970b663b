"""A drill's training on a real Prefect server: started by its deployment, judged by the scheduled health check."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterExpectedStartTime,
)
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.client.schemas.sorting import FlowRunSort

from dflash.drill.conduct import FlowRun
from dflash.errors import DflashError
from tasks.drill_stack import DrillStack

DEPLOYMENT = "demo"
"""Of the flows `train` and `health-check`; a drill gives them its own configuration as a parameter."""

SLUG = "drill-"
"""Beginning of the slugs of a drill's schedules."""

_ASK_EVERY_S = 1.0


class PrefectStage:
    """The deployments that a drill uses.

    Args:
        stack: running servers and workers.
        client: of the stack's server.
        config: configuration file.
        overrides: of this drill.
    """

    def __init__(self, stack: DrillStack, client: SyncPrefectClient, *, config: str, overrides: Sequence[str]) -> None:
        self._stack = stack
        self._client = client
        self._parameters = {"config": config, "overrides": list(overrides)}
        self._training = client.read_deployment_by_name(f"train/{DEPLOYMENT}").id
        self._begun_at = datetime.now(UTC)
        self._asked_s = 0.0
        self._known: list[FlowRun] = []

    def start(self) -> None:
        """`prefect deployment run demo`, by the bare name."""
        options = [word for key, value in self._parameters.items() for word in ("--param", f"{key}={_as_argument(value)}")]
        said = self._stack.prefect("deployment", "run", DEPLOYMENT, *options)
        if re.search(r"UUID: \S+", said) is None:
            raise DflashError(f"Prefect named no flow run:\n{said}", remedy="run the command by hand")

    def flow_runs(self) -> Sequence[FlowRun]:
        """Flow runs of the training since this drill began, oldest first; asked for once a second."""
        if time.monotonic() - self._asked_s >= _ASK_EVERY_S:
            chosen = FlowRunFilter(
                deployment_id=FlowRunFilterDeploymentId(any_=[self._training]),
                expected_start_time=FlowRunFilterExpectedStartTime(after_=self._begun_at),
            )
            found = self._client.read_flow_runs(flow_run_filter=chosen, sort=FlowRunSort.START_TIME_ASC)
            self._known = [FlowRun(run.name, run.state.name, run.state.is_final()) for run in found if run.state is not None]
            self._asked_s = time.monotonic()
        return self._known

    def kill_worker(self) -> None:
        """See `DrillStack`."""
        self._stack.kill_worker()

    @contextmanager
    def health_checks(self, *, every_s: float) -> Iterator[None]:
        """Let the scheduled health check judge this drill's run while the block runs."""
        deployment = self._client.read_deployment_by_name(f"health-check/{DEPLOYMENT}")
        for schedule in deployment.schedules:
            if (schedule.slug or "").startswith(SLUG):  # of a drill that was killed, and whose run it would bring back
                self._forget(deployment.id, schedule.id)
        interval = IntervalSchedule(interval=timedelta(seconds=every_s)).model_dump(mode="json")
        body = [{"schedule": interval, "active": True, "parameters": self._parameters, "slug": f"{SLUG}{time.time_ns()}"}]
        place = {"id": deployment.id}
        created = self._client.request("POST", "/deployments/{id}/schedules", path_params=place, json=body).json()
        try:
            yield
        finally:
            self._forget(deployment.id, created[0]["id"])

    def _forget(self, deployment: UUID, schedule: UUID | str) -> None:
        place = {"id": deployment, "schedule_id": schedule}
        self._client.request("DELETE", "/deployments/{id}/schedules/{schedule_id}", path_params=place)


def _as_argument(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
