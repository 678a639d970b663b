"""The plugin: what a bare deployment name means, and that nothing else changes."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.orchestration import PrefectClient, SyncPrefectClient
from prefect.client.orchestration._deployments.client import DeploymentAsyncClient, DeploymentClient
from prefect.plugins import HookContext

import prefect_dflash
from prefect_dflash.bare_names import LOOKUP, MARK, install
from prefect_dflash.choice import Candidate, choose

LOGGER = logging.getLogger("test")


def known(*full_names: str) -> list[Candidate]:
    return [Candidate(*full_name.split("/")) for full_name in full_names]


@pytest.mark.parametrize(
    ("deployed", "meant"),
    [
        (["train/train-v2"], "train/train-v2"),
        (["health-check/train-v2"], "health-check/train-v2"),
        (["health-check/train-v2", "prepare-data/train-v2", "train/train-v2"], "train/train-v2"),
        ([], "train/train-v2"),
        (["train/other", "compare/any"], "train/train-v2"),
    ],
)
def test_a_bare_name_means_its_only_bearer_or_the_training(deployed: list[str], meant: str) -> None:
    assert choose("train-v2", known(*deployed)) == meant


def test_a_name_that_several_other_flows_bear_is_refused_with_all_of_them() -> None:
    with pytest.raises(ValueError, match="health-check/x, prepare-data/x"):
        choose("x", known("prepare-data/x", "health-check/x"))


@dataclass
class Server:
    """Deployments of a server, and the names that the stock look-up was asked for."""

    deployed: list[tuple[str, str]]
    asked: list[str] = field(default_factory=list)
    listed: int = 0
    flow_ids: dict[str, UUID] = field(default_factory=dict)

    def flow_id(self, flow: str) -> UUID:
        return self.flow_ids.setdefault(flow, uuid4())

    def deployments(self, deployment_filter: Any) -> list[Any]:
        self.listed += 1
        wanted = deployment_filter.name.any_
        return [SimpleNamespace(name=name, flow_id=self.flow_id(flow)) for flow, name in self.deployed if name in wanted]

    def flows(self, flow_filter: Any) -> list[Any]:
        return [SimpleNamespace(id=key, name=name) for name, key in self.flow_ids.items() if key in flow_filter.id.any_]


def sync_client(server: Server) -> Any:
    class Client:
        def read_deployment_by_name(self, name: str) -> str:
            server.asked.append(name)
            return name

        def read_deployments(self, *, deployment_filter: Any) -> list[Any]:
            return server.deployments(deployment_filter)

        def read_flows(self, *, flow_filter: Any) -> list[Any]:
            return server.flows(flow_filter)

    return Client


def async_client(server: Server) -> Any:
    class Client:
        async def read_deployment_by_name(self, name: str) -> str:
            server.asked.append(name)
            return name

        async def read_deployments(self, *, deployment_filter: Any) -> list[Any]:
            return server.deployments(deployment_filter)

        async def read_flows(self, *, flow_filter: Any) -> list[Any]:
            return server.flows(flow_filter)

    return Client


@pytest.fixture
def lookup(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """Both clients, wrapped by the plugin, over one fake server: `lookup(server, name)` asks both and compares them."""

    def ask(server: Server, name: str) -> str:
        asynchronous, synchronous = async_client(server), sync_client(server)
        module = "prefect.client.orchestration._deployments.client"
        monkeypatch.setattr(f"{module}.DeploymentAsyncClient", asynchronous)
        monkeypatch.setattr(f"{module}.DeploymentClient", synchronous)
        install(LOGGER)
        install(LOGGER)  # a second time changes nothing
        first, second = asyncio.run(asynchronous().read_deployment_by_name(name)), synchronous().read_deployment_by_name(name)
        assert first == second
        return str(first)

    return ask


def test_both_clients_resolve_a_bare_name_through_the_stock_lookup(lookup: Any) -> None:
    server = Server([("train", "demo"), ("health-check", "demo"), ("train", "other")])
    assert lookup(server, "demo") == "train/demo"
    assert server.asked == ["train/demo"] * 2
    assert server.listed == 2


@pytest.mark.parametrize("name", ["health-check/demo", "train/demo", "a/b/c", "", " "])
def test_every_other_name_goes_to_the_stock_lookup_untouched_and_costs_nothing(lookup: Any, name: str) -> None:
    server = Server([("train", "demo")])
    assert lookup(server, name) == name
    assert server.listed == 0


def test_a_prefect_without_the_lookup_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    module = "prefect.client.orchestration._deployments.client"
    for name in ("DeploymentAsyncClient", "DeploymentClient"):
        monkeypatch.setattr(f"{module}.{name}", type(name, (), {}))
    with caplog.at_level(logging.WARNING):
        install(LOGGER)
    assert "bare deployment names are not resolved" in caplog.text


def test_prefect_finds_the_plugin_and_the_hook_wraps_the_real_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [entry.value for entry in entry_points(group="prefect.plugins") if entry.name == "dflash"] == ["prefect_dflash"]
    for client in (DeploymentAsyncClient, DeploymentClient):
        monkeypatch.setattr(client, LOOKUP, getattr(getattr(client, LOOKUP), "__wrapped__", getattr(client, LOOKUP)))
        assert not hasattr(getattr(client, LOOKUP), MARK)
    prefect_dflash.setup_environment(ctx=HookContext("3.9.1", None, logging.getLogger))
    for whole in (PrefectClient, SyncPrefectClient):
        assert hasattr(getattr(whole, LOOKUP), MARK)
