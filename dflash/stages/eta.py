"""How long a stage still takes, from how far it has come: pure but for the times it is given."""

from __future__ import annotations

MIN_ELAPSED_S = 3.0
"""Before this a rate says more about the start than about the rest."""


class TimeLeft:
    """Estimates the rest of each label's work from its mean rate since it was first reported."""

    def __init__(self) -> None:
        self._label = ""
        self._begun_s, self._begun_done = 0.0, 0

    def text(self, label: str, done: int, total: int, *, now_s: float) -> str:
        """Such as `about 4 min left`; empty while nothing can be said.

        Args:
            label: what is being done; another label begins anew.
            done: how far it is.
            total: how far it has to go.
            now_s: a monotonic clock.
        """
        if label != self._label or done < self._begun_done:
            self._label, self._begun_s, self._begun_done = label, now_s, done
        elapsed_s, progress = now_s - self._begun_s, done - self._begun_done
        if elapsed_s < MIN_ELAPSED_S or progress <= 0 or done >= total:
            return ""
        return f"about {duration(elapsed_s * (total - done) / progress)} left"


def duration(seconds: float) -> str:
    """A time span for people: `40 s`, `4 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
