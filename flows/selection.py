"""The automation that starts checkpoint selection: a due checkpoint's event becomes a run of `select/due-checkpoints`."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from prefect import get_client
from prefect.automations import Automation
from prefect.events.actions import RunDeployment
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound

from tasks.events import DUE

SELECTION = "dflash: select among due checkpoints"
DEPLOYMENT = "select/due-checkpoints"


def selection_automation() -> Automation | None:
    """Starts the deployment with the run's folder for every event that tells of a due checkpoint; None until it is deployed."""
    deployment_id = _deployment_id()
    if deployment_id is None:
        return None
    run_dir = {"__prefect_kind": "jinja", "template": "{{ event.payload.run_dir }}"}
    return Automation(
        name=SELECTION,
        description="Installed by `make automations`.",
        trigger=EventTrigger(
            expect={DUE},
            match=ResourceSpecification({"prefect.resource.id": ["dflash.run.*"]}),
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[RunDeployment(source="selected", deployment_id=deployment_id, parameters={"run_dir": run_dir})],
    )


def _deployment_id() -> UUID | None:
    with get_client(sync_client=True) as client:
        try:
            return client.read_deployment_by_name(DEPLOYMENT).id
        except ObjectNotFound:
            return None
