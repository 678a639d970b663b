"""`prefect.yaml` and `prefect.toml`: everything they name exists and fits, without a server."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow, Task
from prefect.utilities.importtools import import_object

from flows.automations import SILENCE_S
from tasks.code_version import code_version

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


def test_no_task_has_tags() -> None:
    """Prefect asks the server for a slot of each tag before a task begins, and a server that is away would end the flow run."""
    modules = [importlib.import_module(f"tasks.{file.stem}") for file in (ROOT / "tasks").glob("*.py") if file.stem != "__init__"]
    found = {item.name: item.tags for module in modules for item in vars(module).values() if isinstance(item, Task)}
    assert len(found) > 10
    assert not {name for name, tags in found.items() if tags}


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


def test_every_deployed_flow_carries_the_version_of_the_code() -> None:
    # Of any other type a deployment's version is git's last commit, whatever the sources are by now.
    assert {deployment["version_type"] for deployment in DEPLOYMENTS} == {"prefect:simple"}
    assert {flow_of(deployment).version for deployment in DEPLOYMENTS} == {code_version()}
    assert re.fullmatch(r"\d+\.\d+\.\d+\+[0-9a-f]{12}", code_version())


def test_a_hook_added_to_one_flow_is_not_another_s() -> None:
    hooks = {flow.name: flow.on_running_hooks for flow in map(flow_of, DEPLOYMENTS)}
    assert all([hook.__name__ for hook in own] == ["show_library_log"] for own in hooks.values())
    assert len({id(own) for own in hooks.values()}) == len(hooks) > 2


def test_a_changed_source_is_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flows").mkdir()
    source = tmp_path / "flows" / "a.py"
    monkeypatch.setattr("tasks.code_version.ROOT", tmp_path)
    found = []
    for text in ("x = 1", "x = 2", "x = 1"):
        source.write_text(text, encoding="utf-8")
        found.append(code_version.__wrapped__())
    assert found[0] == found[2] != found[1]


def test_a_health_check_does_not_pay_for_the_training_s_packages() -> None:
    code = "import sys, flows.health, flows.serve_health\n"
    code += "print(sorted({'torch', 'transformers', 'mlflow', 'pyarrow'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_only_this_projects_plugin_is_allowed_and_nothing_phones_home() -> None:
    settings = tomllib.loads((ROOT / "prefect.toml").read_text(encoding="utf-8"))
    assert settings["plugins"] == {"enabled": True, "allow": ["dflash"]}
    assert settings["server"]["analytics_enabled"] is False
    assert settings["flows"]["heartbeat_frequency"] * 3 == SILENCE_S, "the automation waits for three heartbeats"
    assert settings["api"]["url"].startswith("http://127.0.0.1:")


def test_slots_survive_their_server_so_that_a_reboot_never_stops_the_health_checks() -> None:
    settings = tomllib.loads((ROOT / "prefect.toml").read_text(encoding="utf-8"))
    storage = settings["server"]["concurrency"]["lease_storage"]
    assert storage.endswith(".filesystem")
    assert importlib.import_module(storage).ConcurrencyLeaseStorage, "as Prefect loads it"
    image = (ROOT / "infra" / "image" / "Dockerfile").read_text(encoding="utf-8")
    assert f"PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE={storage}\n" in image
