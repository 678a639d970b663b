"""Publish section of the configuration: what a published drafter says about itself, and how it is audited."""

from __future__ import annotations

from pydantic import Field

from dflash.config.base import Section

HUB_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$"


class PublishConfig(Section):
    """The model card, the audit of a published folder, and the registered model in MLflow."""

    license: str | None = Field(
        None,
        pattern=r"^[a-z0-9][a-z0-9.+-]{0,63}$",
        description="Licence of the weights, as the hub names it, e.g. `apache-2.0`; without one nothing is published.",
    )
    base_model: str | None = Field(
        None, pattern=HUB_NAME, description="The target's name on the hub; `target.path` if that is one."
    )
    tags: tuple[str, ...] = Field((), description="Further tags of the model card.")
    registered_model: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$",
        description="Registered model in MLflow, whose champion a drafter competes with; `dflash-<target>` if absent.",
    )
    audit_prompts: int = Field(2, ge=1, description="Held-out prompts that the published folder is decoded on, lossless.")
    audit_tokens: int = Field(32, ge=2, description="Longest answer of these, in tokens.")
    min_prompts: int = Field(8, ge=2, description="Common prompts below which no drafter takes the champion's place.")
