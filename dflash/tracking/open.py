"""Opening a run's tracker: which store, and whether this continues an MLflow run that exists."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from dflash.config import Config
from dflash.errors import TrackingError
from dflash.tracking.names import TAG_GROUP, TAG_PARENT_RUN, TAG_RUN, TAG_SEGMENT
from dflash.tracking.redact import redact_text
from dflash.tracking.state import NO_STEP, TrackingState, load_state
from dflash.tracking.store import Store
from dflash.tracking.tracker import MlflowTracker, NullTracker, Tracker

URI_VARIABLE = "MLFLOW_TRACKING_URI"
DATABASE_SCHEMES = ("sqlite", "postgresql", "mysql", "mssql")
SERVER_SCHEMES = ("http", "https")


def store_uri(config: Config, environment: Mapping[str, str]) -> str:
    """The MLflow store of a configuration: the environment's, the configured one, or SQLite beside the runs.

    Raises:
        TrackingError: the address is not one of a database or a server.
    """
    default = f"sqlite:///{Path(config.run.root).resolve() / 'mlflow.db'}"
    uri = environment.get(URI_VARIABLE) or config.tracking.uri or default
    scheme = urlsplit(uri).scheme.partition("+")[0]
    if scheme not in (*DATABASE_SCHEMES, *SERVER_SCHEMES):
        raise TrackingError(
            f"the MLflow store {redact_text(uri)!r} is neither a database nor a server",
            remedy="write sqlite:///path/mlflow.db, postgresql://... or http://host:port (the plain file store is gone)",
        )
    return uri


def open_tracker(
    config: Config, *, run_name: str, group: str, segment: int, state_path: Path, more_tags: Mapping[str, str]
) -> Tracker:
    """The tracker of one segment of a run; the MLflow run is created, or found again, when something is first logged.

    Args:
        config: says where to, or that nothing is tracked.
        run_name: name of the run's folder; the MLflow run is `<run_name>.s<segment>`.
        group: what runs are compared by (the configuration's run name).
        segment: number of this stretch of the run; another segment gets its own MLflow run.
        state_path: `RunPaths.tracking_state`.
        more_tags: of the MLflow run, if it is created here.

    Raises:
        TrackingError: the configured address cannot be one.
    """
    if not config.tracking.enabled:
        return NullTracker()
    uri = store_uri(config, os.environ)
    experiment = config.tracking.experiment
    is_database = urlsplit(uri).scheme.partition("+")[0] in DATABASE_SCHEMES
    artifact_root = Path(config.run.root) / "mlartifacts" if is_database else None
    tags = {TAG_GROUP: group, TAG_SEGMENT: str(segment), TAG_RUN: run_name, **more_tags}
    store, earlier = redact_text(uri), load_state(state_path)
    state = TrackingState(
        store=store, experiment=experiment, run_id="", segment=segment, log_offset_bytes=0, last_step=NO_STEP, sending=False
    )
    if earlier is not None and (earlier.store, earlier.experiment) == (store, experiment):
        if earlier.segment == segment:
            state = earlier
        else:  # the log goes on where the earlier segment ended
            begins = earlier.log_offset_bytes
            state = replace(state, log_offset_bytes=begins, segment_offset_bytes=begins)
            tags[TAG_PARENT_RUN] = earlier.run_id
    return MlflowTracker(
        lambda: Store(uri, experiment=experiment, artifact_root=artifact_root),
        uri=uri,
        run_name=f"{run_name}.s{segment}",
        tags=tags,
        state=state,
        state_path=state_path,
        clock=time.monotonic,
    )
