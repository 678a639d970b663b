"""Four simple rules that people and trainers use today, on the loss of whole records: what the checker is measured against.

`loss > 3.0` and `accuracy fell by more than 0.05` (the founding incident), mean + 6 standard deviations of the last 128
(as OLMo-core's stability monitor), and 3 times the mean of the last 10 (as a common spike callback). Each alarm of a
rule asks for a stop: that is all such a rule can say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.health.labels import Label
from benchmarks.health.mixes import Floats
from benchmarks.health.runs import Run

Fired = npt.NDArray[np.bool_]
WARM_UP = 128
_ECHO = 60


@dataclass
class RuleScore:
    """Counts of one rule."""

    runs: int = 0
    events: int = 0
    recalled: int = 0
    false_alarms: int = 0
    right_decisions: int = 0

    def figures(self) -> dict[str, float]:
        """Rates."""
        return {
            "event_recall": round(self.recalled / max(self.events, 1), 4),
            "precision": round(self.recalled / max(self.recalled + self.false_alarms, 1), 4),
            "decision_accuracy": round(self.right_decisions / max(self.runs, 1), 4),
            "false_alarms_per_run": round(self.false_alarms / max(self.runs, 1), 2),
        }


def fired(run: Run) -> dict[str, Fired]:
    """Rows at which each rule fires, after a warm-up."""
    c = run.columns
    weights = c.n_tokens / c.n_tokens.sum(axis=1, keepdims=True)
    loss: Floats = np.where(c.nonfinite, np.nan, (c.loss * weights).sum(axis=1))
    accuracy = (c.accuracy * weights).sum(axis=1)
    rules: dict[str, Fired] = {
        "loss > 3.0": loss > 3.0,
        "accuracy drop > 0.05": np.concatenate([[False], accuracy[:-1] - accuracy[1:] > 0.05]),
        "mean + 6 sd of 128": _beyond(loss, 128, lambda before: before.mean(axis=1) + 6 * before.std(axis=1)),
        "3x mean of 10": _beyond(loss, 10, lambda before: 3 * before.mean(axis=1)),
    }
    for rows in rules.values():
        rows[:WARM_UP] = False
        rows[~c.present] = False
    return rules


def _beyond(loss: Floats, window: int, limit: Callable[[Floats], Floats]) -> Fired:
    before = np.lib.stride_tricks.sliding_window_view(loss, window)[:-1]
    return np.concatenate([np.zeros(window, bool), loss[window:] > limit(before)])


def add(score: RuleScore, rows: Fired, label: Label | None) -> None:
    """Count one run."""
    at = np.flatnonzero(rows)
    score.runs += 1
    score.right_decisions += (len(at) > 0) == (label is not None and label.rolls_back)
    near = np.zeros(0, bool) if label is None else (at >= label.onset) & (at <= label.end + _ECHO)
    if label is not None and label.detectors:
        score.events += 1
        score.recalled += bool(near.any())
    loose = at if label is None else at[~near]
    score.false_alarms += int((np.diff(loose, prepend=-1000) > 50).sum())
