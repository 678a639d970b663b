"""Records of a drill: the fault to plant, and each time that it was really planted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DRILL_SCHEMA_VERSION = 1

FaultName = Literal[
    "none", "nan", "explosion", "ramp", "bad-resume", "hung-save", "killed-worker", "corrupt-checkpoint", "save-artefact",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What a drill plants in a run.

    Attributes:
        name: kind of fault.
        step: first step concerned.
        first_position, end_position: plan positions [first, end) whose batches are bad whenever they are trained on; empty
            where the fault is not in the data.
        seed: of whatever is random in it.
    """

    name: FaultName
    step: int
    first_position: int
    end_position: int
    seed: int
    schema_version: int = DRILL_SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class PlantedFault:
    """One line of `planted.jsonl`: the fault has just taken effect.

    Attributes:
        step: record step concerned, or the state that was restored.
        position: plan position of the bad batch, None where the fault is not in the data.
        at_s: wall time.
    """

    name: FaultName
    segment: int
    step: int
    position: int | None
    at_s: float
    schema_version: int = DRILL_SCHEMA_VERSION
