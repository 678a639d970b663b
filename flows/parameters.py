"""Types of flow parameters: Prefect refuses a submission that does not fit, naming the parameter.

Hyper-parameters are no flow parameters: they live in the configuration file and reach it as overrides.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Annotated, Any

from prefect import runtime
from pydantic import Field

from dflash.config import CREDENTIAL_PATTERNS, load_config

ConfigPath = Annotated[str, Field(pattern=r"\.ya?ml$", description="Configuration file, relative to the checkout.")]
# Parameters are kept by the server for good, so a credential is refused by their schema, before anything has been stored.
_NO_CREDENTIAL: dict[str, Any] = {"not": {"anyOf": [{"pattern": pattern} for pattern in CREDENTIAL_PATTERNS]}}
Override = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+=", json_schema_extra=_NO_CREDENTIAL)]
Overrides = Annotated[list[Override], Field(description="Dotted assignments, e.g. `train.lr=3e-4`.")]
RunName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$", description="Name instead of the configured `run.name`.")]
RunFolder = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", description="A run's folder name, e.g. `demo-001`.")]
ServerUrl = Annotated[str, Field(pattern=r"^https?://[^\s@]+$", description="Address of a server, e.g. `http://127.0.0.1:8000`.")]
RunPath = Annotated[str, Field(min_length=1, description="A run's folder, relative to the checkout.")]
RunPaths = Annotated[list[RunPath], Field(min_length=2)]


def flow_run_name() -> str:
    """`<configuration>-<time>`, e.g. `demo-0715-093012`, so that runs are told apart in the UI."""
    parameters: dict[str, Any] = runtime.flow_run.parameters
    named = parameters.get("run_name") or parameters.get("config") or parameters.get("run_dir") or "runs"
    stem = PurePath(str(named)).name.removesuffix(".yaml").removesuffix(".yml")
    return f"{stem}-{datetime.now(UTC):%m%d-%H%M%S}"


def command_line(description: str) -> argparse.ArgumentParser:
    """Options that every flow has when it is run as a program."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", required=True, help="configuration file, e.g. configs/demo.yaml")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override a key")
    return parser


def check(arguments: argparse.Namespace) -> None:
    """Read the configuration once before anything is started.

    Raises:
        ConfigError: it is missing, or a key or value is not allowed.
    """
    named = [f"run.name={arguments.run_name}"] if getattr(arguments, "run_name", None) else []
    load_config(arguments.config, overrides=[*arguments.overrides, *named])
