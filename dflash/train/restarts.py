"""When a trainer is started again: ever longer waits, a budget of crashes that progress clears, and what counts as a stall.

Invariant: pure, times are given; a crash that comes back without progress ends the run after `train.max_restarts` restarts,
while crashes far apart (a machine that reboots every other week) never add up.
"""

from __future__ import annotations

from dflash.config import TrainConfig


class RestartBudget:
    """Counts the crashes of one supervisor."""

    def __init__(self, train: TrainConfig) -> None:
        self._train = train
        self._last_end = 0
        self.in_row = 0
        """Crashes without enough progress between them."""
        self.total = 0

    def crashed(self, *, end: int) -> None:
        """Note a crash after which the log has `end` live records."""
        if end - self._last_end >= self._train.restart_heal_steps:
            self.in_row = 0
        self.in_row += 1
        self.total += 1
        self._last_end = end

    @property
    def spent(self) -> bool:
        """Whether no further restart is allowed."""
        return self.in_row > self._train.max_restarts

    @property
    def wait_s(self) -> float:
        """Seconds to wait before the next start."""
        if self.in_row == 0:
            return 0.0
        doubled = self._train.restart_wait_s * 2.0 ** min(self.in_row - 1, 60)
        return min(self._train.restart_max_wait_s, doubled)


class StallWatch:
    """Notices that a living trainer has made no step for too long: a target that hangs stops everything and ends nothing."""

    def __init__(self, stall_s: float, *, now_s: float) -> None:
        self._stall_s = stall_s
        self._end = -1
        self._since_s = now_s

    def stalls(self, end: int, *, now_s: float) -> bool:
        """Whether the log has had `end` live records for too long."""
        if end != self._end:
            self._end, self._since_s = end, now_s
        return now_s - self._since_s > self._stall_s
