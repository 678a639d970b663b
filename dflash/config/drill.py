"""The drill section of the configuration: whether faults may be planted in a run on purpose."""

from __future__ import annotations

from pydantic import Field

from dflash.config.base import Section


class DrillConfig(Section):
    """Fire drills (`make drill`); everything here is off in a run that matters."""

    faults: bool = Field(False, description="Let a drill plant a fault in the trainer; it is refused everywhere else.")
    check_every_s: float = Field(10.0, gt=0, description="Schedule of the drill's own health check, in place of five minutes.")
    fault_step: int = Field(700, ge=1, description="Step at which a drill plants its fault.")
