"""A password in an override is refused by the flow's own schema, which the server checks before it stores anything."""

from __future__ import annotations

from typing import Any

import pytest
from prefect.utilities.schema_tools.validation import validate

from flows.prepare import prepare
from flows.regenerate import regenerate
from flows.train import train


def refusals(flow: Any, override: str) -> list[Any]:
    """What the check that a submission goes through finds."""
    given = {"config": "configs/demo.yaml", "overrides": [override]}
    return list(validate(given, flow.parameters.model_dump()))


@pytest.mark.parametrize("flow", [train, prepare, regenerate], ids=lambda flow: flow.name)
def test_a_password_never_becomes_a_parameter(flow: Any) -> None:
    for address in ("http://me:pw@host", "postgresql+psycopg://a:b@h/db", "s3://k:s@bucket/x"):
        assert refusals(flow, f"tracking.uri={address}")
    for address in ("http://host:5000", "s3://bucket/a@b:c", "sqlite:///runs/mlflow.db"):
        assert not refusals(flow, f"tracking.uri={address}")
