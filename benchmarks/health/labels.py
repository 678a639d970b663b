"""What a fault is: where it begins and ends, what should be said of it, and what should be done."""

from __future__ import annotations

from dataclasses import dataclass

from dflash.records import Severity

SHOWS = frozenset(
    {"loss spike", "gradient spike", "sustained rise", "divergence", "accuracy drop", "gradient explosion", "non-finite"}
)
"""Detectors that damage of the weights may also set off."""


@dataclass(frozen=True)
class Label:
    """One injected fault.

    Attributes:
        onset, end: first and last record step that is not as it should be.
        due: step from which the fault meets the definition in the table of detectors (a queue is not low on its first step).
        detectors: any of them finds it, at `severity` or above; empty for what should be passed over in silence.
        tolerated: what else it may set off.
        causes: right names of its cause; empty where no training signal is involved.
        culprits: batches that must not be trained on again.
    """

    kind: str
    onset: int
    end: int
    due: int
    severity: Severity
    detectors: frozenset[str]
    tolerated: frozenset[str]
    causes: frozenset[str]
    rolls_back: bool
    culprits: tuple[int, ...] = ()
