"""How long a write of this state takes: when one hangs, and whether one more fits into the time that is left.

Invariant: pure; a state of one run always has the same size, so the durations of its finished writes are its write rate.
"""

from __future__ import annotations

import statistics

from dflash.config import CheckpointConfig

_MARGIN = 1.25
"""A disk is never as fast as its median promises."""


class WriteTimes:
    """Durations of the writes that this process has finished."""

    def __init__(self, rule: CheckpointConfig) -> None:
        self._rule = rule
        self._finished_s: list[float] = []

    def note(self, write_s: float) -> None:
        """Remember a finished write."""
        self._finished_s.append(write_s)

    @property
    def limit_s(self) -> float:
        """Seconds after which a write hangs."""
        rule, usual_s = self._rule, self.usual_s
        return rule.hung_max_s if usual_s is None else min(rule.hung_max_s, max(rule.hung_min_s, rule.hung_factor * usual_s))

    def fits(self, budget_s: float, *, in_flight_s: float | None) -> bool:
        """Whether a write begun now is likely to be durable in `budget_s`; one that nothing is known of may be tried.

        Args:
            budget_s: time left.
            in_flight_s: for how long a write that must end first has been running; None without one.
        """
        if self.usual_s is None:
            return budget_s > 0
        careful_s = _MARGIN * self.usual_s
        before_s = 0.0 if in_flight_s is None else max(0.0, careful_s - in_flight_s)
        return before_s + careful_s <= budget_s

    @property
    def usual_s(self) -> float | None:
        """Median of the finished writes; None before the first."""
        return statistics.median(self._finished_s) if self._finished_s else None
