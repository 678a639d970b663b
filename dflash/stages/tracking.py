"""The MLflow run that belongs to a run's folder."""

from __future__ import annotations

from dflash.stages.run import Run
from dflash.tracking import Tracker, open_tracker


def tracker_of(run: Run) -> Tracker:
    """Open (or continue) the run's one MLflow run: a crash continues it, and only a rollback will begin another segment's."""
    return open_tracker(run.config, run_name=run.name, group=run.config.run.name, segment=0, state_path=run.paths.tracking_state)
