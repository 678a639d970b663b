"""The MLflow run that belongs to a run's folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dflash.stages.run import Run
from dflash.tracking import Tracker, load_state, open_tracker
from dflash.tracking.names import TAG_ABANDONED_FOR, TAG_ROLLED_BACK_TO


def tracker_of(run: Run) -> Tracker:
    """Open (or continue) the MLflow run of the run's newest segment: a crash continues it, only a rollback begins another."""
    state = load_state(run.paths.tracking_state)
    return _open(run, 0 if state is None else state.segment)


def segment_tracker(run: Run, event: Mapping[str, Any], *, abandoned: Tracker, describe: Callable[[Tracker], None]) -> Tracker:
    """End the MLflow run of a segment that a rollback abandoned, and open one for the segment that goes on.

    Args:
        run: whose segments.
        event: the `rollback_end` event of the log.
        abandoned: tracker of the segment that ends here.
        describe: logs parameters and data set of the run.
    """
    segment, details = int(event["segment"]), event.get("details", {})
    abandoned.set_tags({TAG_ABANDONED_FOR: str(segment)})
    abandoned.finish("KILLED")
    tracker = _open(run, segment)
    tracker.set_tags({TAG_ROLLED_BACK_TO: str(details.get("target_step", event["step"])), "rung": str(details.get("rung", ""))})
    describe(tracker)
    return tracker


def _open(run: Run, segment: int) -> Tracker:
    group, state_path = run.config.run.name, run.paths.tracking_state
    return open_tracker(run.config, run_name=run.name, group=group, segment=segment, state_path=state_path)
