"""The MLflow runs that belong to a run's folder: one for each segment, fed from the run's log.

Invariant: whoever is killed in the change of segments is followed by one who repeats it: the abandoned run is tagged before the new
one is created with all its tags, and the log's line about the rollback is passed last.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from dflash.config import flat_params, load_config
from dflash.data.pointer import read_data_pointer
from dflash.data.prepare import PreparedData, load_data, read_preview
from dflash.stages.run import Run
from dflash.tracking import LogForwarder, RunStatus, Tracker, load_state, open_tracker, redact_text, store_uri
from dflash.tracking.names import TAG_ABANDONED_FOR, TAG_ROLLED_BACK_TO
from dflash.train.runs import run_is_live


def tracker_of(run: Run) -> Tracker:
    """Open (or continue) the MLflow run of the run's newest segment: a crash continues it, only a rollback begins another.

    A store that has heard nothing of the run yet gets it from its first segment on.
    """
    state, tracking = load_state(run.paths.tracking_state), run.config.tracking
    if state is None or not tracking.enabled:
        return _open(run, 0, {})
    known = (state.store, state.experiment) == (redact_text(store_uri(run.config, os.environ)), tracking.experiment)
    return _open(run, state.segment if known else 0, {})


def close_again(run: Run, tracker: Tracker, *, otherwise: RunStatus | None = None) -> None:
    """Leave the MLflow run as it was: whoever adds something to an ended run opens it, and nobody else would close it.

    Args:
        run: one that is being trained is left to its training.
        tracker: its tracker, which has added something.
        otherwise: status of a run that had not ended; None leaves it open.
    """
    status = "FINISHED" if run.paths.summary.exists() else tracker.ended_as or otherwise
    if status is not None and not run_is_live(run.paths):
        tracker.finish(status)


def forwarder_of(run: Run, *, describe: Callable[[Tracker], None]) -> LogForwarder:
    """Sends what is new in a run's log to the MLflow runs of its segments; `describe` is called with each one that begins."""
    forwarder = LogForwarder(
        run.paths,
        tracker_of(run),
        begin_segment=lambda event: segment_tracker(run, event, abandoned=forwarder.tracker, describe=describe),
    )
    return forwarder


def description_of(run: Run) -> Callable[[Tracker], None]:
    """Logs a run's parameters and its data set, which is read once, when it is first wanted."""

    @functools.cache
    def data_set() -> PreparedData:
        pointer = read_data_pointer(run.paths)
        return load_data(pointer.location, fingerprint=pointer.fingerprint, verify="sizes")

    def describe(tracker: Tracker) -> None:
        data = data_set()
        # What a single call measures otherwise is no parameter of the run, and MLflow refuses to change one.
        tracker.log_params(flat_params(load_config(run.paths.config)))
        tracker.log_dataset(data.manifest, data.location, preview_html=read_preview(data))

    return describe


def segment_tracker(
    run: Run, event: Mapping[str, Any], *, abandoned: Tracker, describe: Callable[[Tracker], None]
) -> Tracker | None:
    """End the MLflow run of a segment that a rollback abandoned, and open one for the segment that goes on.

    Args:
        run: whose segments.
        event: the `rollback_end` event of the log.
        abandoned: tracker of the segment that ends here.
        describe: logs parameters and data set of the run.

    Returns:
        None if the store is away: nothing has been opened then, and all of it can be repeated.
    """
    segment, details = int(event["segment"]), event.get("details", {})
    abandoned.set_tags({TAG_ABANDONED_FOR: str(segment)})
    abandoned.finish("KILLED")
    if not abandoned.connect():
        return None
    tags = {TAG_ROLLED_BACK_TO: str(details.get("target_step", event["step"])), "rung": str(details.get("rung", ""))}
    tracker = _open(run, segment, tags)
    describe(tracker)
    return tracker


def _open(run: Run, segment: int, tags: Mapping[str, str]) -> Tracker:
    group, state_path = run.config.run.name, run.paths.tracking_state
    return open_tracker(run.config, run_name=run.name, group=group, segment=segment, state_path=state_path, more_tags=tags)
