"""The rollback section of the configuration: ladder, budgets, how much may be skipped."""

from __future__ import annotations

from pydantic import Field

from dflash.config.base import Section


class RollbackConfig(Section):
    """How far a run may help itself before it asks for a person."""

    enabled: bool = Field(True, description="Return to a clean checkpoint by itself; a damaged run is halted otherwise.")
    region_steps: int = Field(1000, ge=1, description="Onsets this close to a region's first one belong to it.")
    cooldown_steps: int = Field(300, ge=0, description="Steps after a rollback in which damage of another region waits.")
    max_per_region: int = Field(3, ge=0, description="Rollbacks of one region before the run is halted.")
    max_per_day: int = Field(5, ge=0, description="Rollbacks in 24 hours before the run is halted.")
    max_per_run: int = Field(10, ge=0, description="Rollbacks of a run before it is halted.")
    skip_positions: tuple[int, int] = Field(
        (200, 500), description="Plan positions skipped at least by the second and by the third rollback of a region."
    )
    max_skip_frac: float = Field(0.05, ge=0, le=1, description="Share of an epoch that may be skipped before the run is halted.")
    rewarm_from: float = Field(0.1, gt=0, le=1, description="Learning-rate factor that the second rollback begins with ...")
    rewarm_steps: int = Field(200, ge=0, description="... and the steps until the full rate is back.")
    lr_cap: float = Field(0.5, gt=0, le=1, description="Learning-rate factor kept after the third rollback.")
