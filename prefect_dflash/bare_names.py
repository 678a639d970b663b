"""Resolution of bare deployment names, wrapped around Prefect's own look-up.

Invariant: the wrapper acts only on a bare name (no slash, not empty), which stock Prefect always refuses, so nothing
that works without the plugin behaves differently; and the stock method always has the last word.
Hard decision: when several flows deploy under one name (`train/demo`, `health-check/demo`), the flow `train`
is meant, because the bare name is short for "run that training"; among other flows the name is refused.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from prefect_dflash.choice import Candidate, choose

if TYPE_CHECKING:
    from prefect.client.schemas.responses import DeploymentResponse

MARK = "_dflash_bare_names"
"""Attribute that a wrapped method carries, so that it is wrapped once."""

LOOKUP = "read_deployment_by_name"


def install(logger: logging.Logger) -> None:
    """Wrap the look-up of both clients; a second call changes nothing, a Prefect without the look-up is left alone."""
    # Imported here: at the plugin's own import Prefect is not complete yet.
    from prefect.client.orchestration._deployments.client import DeploymentAsyncClient, DeploymentClient

    for client, wrap in ((DeploymentAsyncClient, _wrap_async), (DeploymentClient, _wrap_sync)):
        stock = getattr(client, LOOKUP, None)
        if stock is None:
            logger.warning("%s has no %s: bare deployment names are not resolved", client.__name__, LOOKUP)
        elif not hasattr(stock, MARK):
            wrapped = wrap(stock)
            setattr(wrapped, MARK, True)
            setattr(client, LOOKUP, wrapped)


def _is_bare(name: object) -> bool:
    return isinstance(name, str) and bool(name.strip()) and "/" not in name


def _wrap_async(stock: Callable[..., Awaitable[DeploymentResponse]]) -> Callable[..., Awaitable[DeploymentResponse]]:
    @functools.wraps(stock)
    async def read_deployment_by_name(self: Any, name: str) -> DeploymentResponse:
        if not _is_bare(name):
            return await stock(self, name)
        found = await self.read_deployments(deployment_filter=_named(name))
        flows = {flow.id: flow.name for flow in await self.read_flows(flow_filter=_owning(found))} if found else {}
        return await stock(self, _full_name(name, found, flows))

    return read_deployment_by_name


def _wrap_sync(stock: Callable[..., DeploymentResponse]) -> Callable[..., DeploymentResponse]:
    @functools.wraps(stock)
    def read_deployment_by_name(self: Any, name: str) -> DeploymentResponse:
        if not _is_bare(name):
            return stock(self, name)
        found = self.read_deployments(deployment_filter=_named(name))
        flows = {flow.id: flow.name for flow in self.read_flows(flow_filter=_owning(found))} if found else {}
        return stock(self, _full_name(name, found, flows))

    return read_deployment_by_name


def _named(name: str) -> Any:
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName

    return DeploymentFilter(name=DeploymentFilterName(any_=[name]))


def _owning(found: Sequence[DeploymentResponse]) -> Any:
    from prefect.client.schemas.filters import FlowFilter, FlowFilterId

    return FlowFilter(id=FlowFilterId(any_=[deployment.flow_id for deployment in found]))


def _full_name(name: str, found: Sequence[DeploymentResponse], flows: dict[Any, str]) -> str:
    candidates = [Candidate(flow=flows[item.flow_id], deployment=item.name) for item in found if item.flow_id in flows]
    return choose(name, candidates)
