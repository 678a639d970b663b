"""A credential in an override is refused by the flow's own schema, which the server checks before it stores anything."""

from __future__ import annotations

import re
from typing import Any

import pytest
from prefect.utilities.schema_tools.validation import validate

from dflash.config import CREDENTIAL_PATTERNS
from flows.prepare import prepare
from flows.regenerate import regenerate
from flows.train import train


def refusals(flow: Any, override: str) -> list[Any]:
    """What the check that a submission goes through finds."""
    given = {"config": "configs/demo.yaml", "overrides": [override]}
    return list(validate(given, flow.parameters.model_dump()))


@pytest.mark.parametrize("flow", [train, prepare, regenerate], ids=lambda flow: flow.name)
def test_a_credential_never_becomes_a_parameter(flow: Any) -> None:
    for address in ("http://me:pw@host", "postgresql+psycopg://a:b@h/db", "s3://k:s@bucket/x"):
        assert refusals(flow, f"tracking.uri={address}")
    for address in ("http://host:5000", "s3://bucket/a@b:c", "sqlite:///runs/mlflow.db"):
        assert not refusals(flow, f"tracking.uri={address}")
    signed = "data.files=[https://h/a.jsonl?X-Amz-Signature=abc]"
    for override in (
        "tracking.uri=https://token@h",
        signed,
        "data.template_flags.api_key=x",
        "data.template_flags={a: HTTPS://t@h}",
        "data.files=[https://h/a.jsonl?SIG=abc]",
        "data.template_flags.my_password=x",
        "data.template_flags={my_password: x}",
        "data.template_flags={'a': 1, \"API-Key\": x}",
    ):
        assert refusals(flow, override)
        assert any(re.search(pattern, override) for pattern in CREDENTIAL_PATTERNS), "what the server's schema says, it means"
    for override in (
        "data.answers.server.api_key_env=MY_KEY",
        "data.answers.server={url: 'http://h', api_key_env: MY_KEY}",
        "data.system_prompt='keep the secret: it is yours'",
        "data.files=[https://h/a.jsonl?part=1]",
        "data.seed=1",
        "train.lr=3e-4",
    ):
        assert not refusals(flow, override)
