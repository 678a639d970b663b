"""Prefect plugin: `prefect deployment run train-v2` finds the deployment without its flow's name.

Prefect names deployments `<flow>/<deployment>` and refuses a bare name. The plugin wraps the client's one
look-up so that a bare name is resolved when that is unambiguous; every name with a slash goes to the stock
method untouched. It is loaded only where `prefect.toml` enables plugins and allows `dflash`.
"""

from __future__ import annotations

from prefect.plugins import HookContext, register_hook

from prefect_dflash.bare_names import install

PREFECT_PLUGIN_API_REQUIRES = ">=0.1,<1"


@register_hook
def setup_environment(*, ctx: HookContext) -> None:
    """Wrap the clients' look-up of deployments; called by Prefect once it is imported."""
    install(ctx.logger_factory("prefect.plugins.dflash"))


__all__ = ["PREFECT_PLUGIN_API_REQUIRES", "setup_environment"]
