"""Probe section of the configuration: the acceptance length of durable checkpoints, measured while the training goes on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dflash.config.base import Section


class ProbeConfig(Section):
    """A few held-out prompts decoded with durable checkpoints, by a process of its own with low priority."""

    every_steps: int = Field(
        0, ge=0, description="Probe the first checkpoint at or behind every multiple of this many steps, and the last one; 0: none."
    )
    runner: Literal["supervisor", "flow"] = Field(
        "supervisor",
        description="Who probes: a process that the training's supervisor starts, or the flow `select`, started by every due "
        "checkpoint (`make automations`).",
    )
    num_prompts: int = Field(
        16, ge=1, description="Held-out prompts of a probe, none of them the final evaluation's where there are enough."
    )
    max_new_tokens: int = Field(64, ge=1, description="Longest answer of a probe, in tokens.")
    batch_size: int = Field(8, ge=1, description="Prompts decoded at once.")
    device: str = Field(
        "cpu",
        pattern=r"^(cpu|cuda:\d+)$",
        description="Device of the probes, e.g. `cuda:7`: a GPU that no replica uses, or the CPU.",
    )
    torch_threads: int = Field(1, ge=1, description="Torch threads of the probing process.")
    niceness: int = Field(19, ge=0, le=19, description="Niceness of the probing process; 19 takes only time that nobody wants.")
    timeout_s: float = Field(
        1800.0,
        gt=0,
        description="A probe that gives nothing for so long is ended; it has three tries. With `runner: flow`, a checkpoint that "
        "no flow has probed for so long counts as given up.",
    )
    final_wait_s: float = Field(300.0, ge=0, description="Longest wait for the last checkpoint's probe when the training is over.")
    min_frac: float = Field(
        0.8,
        gt=0,
        le=1,
        description="Acceptance length against the best clean checkpoint before, under which a probed one is suspect.",
    )
