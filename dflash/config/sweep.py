"""Sweep section of the configuration: which ways of decoding are measured beside each other, and on how much."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from dflash.config.base import Section


class SweepConfig(Section):
    """Every block size at every temperature and batch size; each group is one alternating run on the same prompts."""

    block_sizes: tuple[Annotated[int, Field(ge=2)], ...] | None = Field(
        None, description="Block sizes at decode (drafts + 1); 2 to the trained one if absent."
    )
    temperatures: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        (0.0, 0.6, 1.0), min_length=1, description="0 is greedy; otherwise keyed sampling."
    )
    batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (1, 2, 4, 8), min_length=1, description="Prompts decoded together."
    )
    num_prompts: int = Field(16, ge=1, description="Held-out prompts of a sweep, the evaluation's first.")
    max_new_tokens: int = Field(64, ge=2, description="Longest answer of a sweep, in tokens.")

    @model_validator(mode="after")
    def _once_each(self) -> Self:
        for name in ("block_sizes", "temperatures", "batch_sizes"):
            values = getattr(self, name) or ()
            if len(set(values)) < len(values):
                raise ValueError(f"{name} names a value twice: {', '.join(map(str, values))}")
        if max(self.batch_sizes) > self.num_prompts:
            raise ValueError(f"batch size {max(self.batch_sizes)} is never reached with num_prompts {self.num_prompts}")
        return self
