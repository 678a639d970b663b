"""`prefect.yaml` and `prefect.toml`: everything they name exists and fits, without a server."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.utilities.importtools import import_object

ROOT = Path(__file__).parents[2]
PREFECT = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))
DEPLOYMENTS = PREFECT["deployments"]


def flow_of(deployment: dict[str, Any]) -> Flow[..., Any]:
    module, name = deployment["entrypoint"].split(":")
    found = import_object(f"{module}.{name}")
    assert isinstance(found, Flow)
    return found


def full_name(deployment: dict[str, Any]) -> str:
    return f"{flow_of(deployment).name}/{deployment['name']}"


BY_NAME = {full_name(deployment): deployment for deployment in DEPLOYMENTS}


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=full_name)
def test_a_deployment_names_a_flow_and_parameters_that_it_takes(deployment: dict[str, Any]) -> None:
    parameters = deployment.get("parameters", {})
    schema = flow_of(deployment).parameters
    assert set(parameters) <= set(schema.properties), "no hyper-parameters, no unknown ones"
    missing = set(schema.required) - set(parameters)
    assert missing <= {"run_dir", "run_dirs"}, "only what nobody can know beforehand is left to the person"
    if not missing:
        flow_of(deployment).validate_parameters(parameters)
    assert deployment["description"]
    if "config" in parameters:
        assert (ROOT / parameters["config"]).is_file()


def test_every_full_name_is_there_once() -> None:
    assert len(BY_NAME) == len(DEPLOYMENTS)
    wanted = {f"{flow}/{name}" for flow in ("train", "health-check", "prepare-data") for name in ("train-v2", "demo")}
    assert wanted <= set(BY_NAME)


@pytest.mark.parametrize("name", ["train-v2", "demo"])
def test_the_health_check_is_scheduled_acts_and_has_workers_of_its_own(name: str) -> None:
    check = BY_NAME[f"health-check/{name}"]
    assert check["schedules"] == [{"slug": "every-5-minutes", "interval": 300, "active": True}]
    assert flow_of(check).parameters.properties["act"]["default"] is True
    assert "act" not in check["parameters"]
    assert check["concurrency_limit"]["limit"] == 1
    assert check["work_pool"]["name"] != BY_NAME[f"train/{name}"]["work_pool"]["name"]
    assert "schedules" not in BY_NAME[f"train/{name}"], "training starts when a person says so"


def test_only_this_projects_plugin_is_allowed_and_nothing_phones_home() -> None:
    settings = tomllib.loads((ROOT / "prefect.toml").read_text(encoding="utf-8"))
    assert settings["plugins"] == {"enabled": True, "allow": ["dflash"]}
    assert settings["server"]["analytics_enabled"] is False
    assert settings["api"]["url"].startswith("http://127.0.0.1:")
