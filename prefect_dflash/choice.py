"""Which deployment a bare name means: a pure decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAIN_FLOW = "train"
"""The flow that a bare name means unless exactly one other flow has a deployment of that name."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A deployment that the server knows."""

    flow: str
    deployment: str

    @property
    def full_name(self) -> str:
        """The name that stock Prefect wants."""
        return f"{self.flow}/{self.deployment}"


def choose(name: str, candidates: Sequence[Candidate]) -> str:
    """The full name that a bare `name` stands for.

    Returns:
        The only bearer's name; the main flow's if it is among several, or if nobody bears the name (the stock look-up then
        says "not found", which is the truth, instead of calling the name malformed).

    Raises:
        ValueError: several flows deploy under this name and none of them is the main flow.
    """
    main = f"{MAIN_FLOW}/{name}"
    bearers = sorted({candidate.full_name for candidate in candidates if candidate.deployment == name})
    if len(bearers) == 1:
        return bearers[0]
    if bearers and main not in bearers:
        raise ValueError(f"Deployment name {name!r} is ambiguous: write one of {', '.join(bearers)}")
    return main
