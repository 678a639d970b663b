"""Experiment tracking that can fail without anyone else noticing: one flat MLflow run per segment of a run.

Invariant: no method raises because the store is away. What was asked for waits in order and is tried again at later calls; the
store's absence is said once, and once more when it is back. The training log is the spool for the steps: they are not
kept here, the forwarder sends them again from its offset.
Hard decision: after a failure the store is left alone for RETRY_AFTER_S, because a dead host costs seconds a call
and the caller is the loop that supervises the trainer.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from dflash.errors import TrackingError
from dflash.records import DataManifest
from dflash.tracking.names import TAG_PARENT_RUN, TAG_SEGMENT, step_metrics
from dflash.tracking.redact import redact_params, redact_text
from dflash.tracking.state import NO_STEP, TrackingState, load_state, save_state
from dflash.tracking.store import MAX_METRICS_PER_CALL, MetricPoint, Store, StoreRefusalError, StoreUnreachableError

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 30.0

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]
_ENDS: Mapping[str | None, RunStatus] = {"FINISHED": "FINISHED", "FAILED": "FAILED", "KILLED": "KILLED"}


class Tracker(Protocol):
    """What stages and the forwarder need of a tracker; none of it raises because a store is away."""

    @property
    def run_id(self) -> str | None:
        """Id of the MLflow run, None while there is none."""

    @property
    def uri(self) -> str | None:
        """The store, without credentials."""

    @property
    def ended_as(self) -> RunStatus | None:
        """How the MLflow run had ended before this tracker opened it again; None if it had not."""

    def connect(self) -> bool:
        """Open the store and send what waits; returns whether it is up."""

    def log_params(self, params: Mapping[str, str]) -> None:
        """Log the configuration as flat text values."""

    def log_dataset(self, manifest: DataManifest, location: str, *, preview_html: str | None) -> None:
        """Attach the data set by its manifest, with the manifest and the page that shows samples as files."""

    def log_metrics(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Log single values at a step."""

    def log_steps(self, records: Sequence[Mapping[str, Any]]) -> bool:
        """Log step records of the training log (parsed JSON); returns whether the store has taken them."""

    def log_artifact(self, path: Path, folder: str) -> None:
        """Copy a file, or a folder's content, into the run's artifacts."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set or replace tags."""

    def finish(self, status: RunStatus) -> None:
        """Send what still waits and close the run."""


class NullTracker:
    """Tracking that is switched off (`tracking.enabled: false`)."""

    run_id: str | None = None
    uri: str | None = None
    ended_as: RunStatus | None = None

    def connect(self) -> bool:
        """There is no store to send anything to."""
        return False

    def log_params(self, params: Mapping[str, str]) -> None:
        """Nothing is tracked."""

    def log_dataset(self, manifest: DataManifest, location: str, *, preview_html: str | None) -> None:
        """Nothing is tracked."""

    def log_metrics(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Nothing is tracked."""

    def log_steps(self, records: Sequence[Mapping[str, Any]]) -> bool:  # noqa: ARG002 - the interface's parameter
        """Nothing is tracked; nothing has to be sent again either."""
        return True

    def log_artifact(self, path: Path, folder: str) -> None:
        """Nothing is tracked."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Nothing is tracked."""

    def finish(self, status: RunStatus) -> None:
        """Nothing is tracked."""


class MlflowTracker:
    """A tracker on an MLflow store; see the module for what happens while the store is away.

    Args:
        connect: opens the store; called again after a failure.
        uri: the store, possibly with credentials.
        run_name: name of the MLflow run.
        tags: tags of a new MLflow run.
        state: what an earlier process of the same segment left, or a fresh state with an empty run id.
        state_path: file that remembers the run between processes.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        *,
        uri: str,
        run_name: str,
        tags: Mapping[str, str],
        state: TrackingState,
        state_path: Path,
        clock: Callable[[], float],
    ) -> None:
        self._connect = connect
        self._run_name = run_name
        self._tags = dict(tags)
        self._state = state
        self._state_path = state_path
        self._clock = clock
        self._store: Store | None = None
        self._pending: deque[tuple[str, Callable[[Store, str], None]]] = deque()
        self._quiet_until_s: float | None = None
        self._refused: set[str] = set()
        self.uri: str | None = redact_text(uri)
        self.ended_as: RunStatus | None = None

    @property
    def run_id(self) -> str | None:
        """Id of the MLflow run, None until the store has answered for the first time."""
        return self._state.run_id or None

    def connect(self) -> bool:
        """Open the store and send what waits, in order; returns whether the store is up."""
        while self._pending:
            label, call = self._pending[0]
            if not self._attempt(label, call):
                return False
            self._pending.popleft()
        return self._attempt("run", _no_call)

    def log_params(self, params: Mapping[str, str]) -> None:
        """Log the configuration as flat text values, credentials hidden."""
        safe = redact_params(params)
        self._submit("parameters", lambda store, run: store.log_params(run, safe))

    def log_dataset(self, manifest: DataManifest, location: str, *, preview_html: str | None) -> None:
        """Attach the data set by its manifest, with the manifest and the page that shows samples as files."""
        self._submit("data set", lambda store, run: store.log_dataset(run, manifest, location, preview_html))

    def log_metrics(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Log single values at a step."""
        now_ms = int(time.time() * 1000)
        points = [MetricPoint(name, value, step, now_ms) for name, value in metrics.items()]
        self._submit("metrics", lambda store, run: store.log_metrics(run, points))

    def log_steps(self, records: Sequence[Mapping[str, Any]]) -> bool:
        """Log step records; returns False if the store is away (send them again later)."""
        if not self.connect():
            return False
        points = [_points(record) for record in records]
        # All of them before the first is sent: a record that is not one must not leave half a batch behind.
        return all(self._attempt("steps", partial(_log_points, points=group)) for group in _groups(points))

    def log_artifact(self, path: Path, folder: str) -> None:
        """Copy a file, or a folder's content, into the run's artifacts."""
        if not path.exists():
            raise TrackingError(f"artifact {path} does not exist", remedy="log files after they have been written")
        self._submit(f"artifact {path.name}", lambda store, run: store.log_artifact(run, path, folder))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set or replace tags."""
        safe = redact_params(tags)
        self._submit("tags", lambda store, run: store.set_tags(run, safe))

    def finish(self, status: RunStatus) -> None:
        """Send what still waits and close the run; what cannot be sent is named in one warning."""
        self._quiet_until_s = None  # the last chance: try even if the last failure was a moment ago
        self._submit("end of the run", lambda store, run: store.end_run(run, status))
        if self._pending:
            waiting = ", ".join(dict.fromkeys(label for label, _ in self._pending))
            logger.warning("MLflow store %s is still away; not logged: %s", self.uri, waiting)

    def _submit(self, label: str, call: Callable[[Store, str], None]) -> None:
        self._pending.append((label, call))
        self.connect()

    def _attempt(self, label: str, call: Callable[[Store, str], None]) -> bool:
        """Try one call; returns False if the store is away, True if it has taken (or for ever refused) the value."""
        if self._quiet_until_s is not None and self._clock() < self._quiet_until_s:
            return False
        try:
            store = self._opened()
            call(store, self._state.run_id)
        except StoreUnreachableError as error:
            if self._quiet_until_s is None:
                logger.warning("%s; training goes on, the values are sent when %s is back", error.what, self.uri)
            self._quiet_until_s = self._clock() + RETRY_AFTER_S
            self._store = None
            return False
        except StoreRefusalError as error:
            if label not in self._refused:
                logger.warning("%s of this run cannot be logged: %s", label, error.what)
            self._refused.add(label)
            return True
        if self._quiet_until_s is not None:
            logger.info("MLflow store %s is back", self.uri)
            self._quiet_until_s = None
        return True

    def _opened(self) -> Store:
        if self._store is None:
            store = self._connect()
            self._claim_run(store)
            self._store = store
        return self._store

    def _claim_run(self, store: Store) -> None:
        # Another process of the same run may have moved the offset since this one read the state.
        state = load_state(self._state_path) if self._state.run_id else None
        state = self._state if state is None or state.run_id != self._state.run_id else state
        status = store.continue_run(state.run_id) if state.run_id else None
        self.ended_as = _ENDS.get(status, self.ended_as)
        if status is None:
            offset_bytes = state.segment_offset_bytes if state.run_id else state.log_offset_bytes  # a deleted run gets all again
            run_id = self._left_behind(store) or store.begin_run(name=self._run_name, tags=self._tags)
            state = replace(state, run_id=run_id, log_offset_bytes=offset_bytes, last_step=NO_STEP, sending=False)
        elif state.sending:
            state = replace(state, last_step=max(store.last_step(state.run_id), state.last_step), sending=False)
        save_state(self._state_path, state)
        self._state = state

    def _left_behind(self, store: Store) -> str | None:
        """The MLflow run of this segment that a process created before it was killed: a parent has one child for a segment."""
        own = {key: self._tags[key] for key in (TAG_PARENT_RUN, TAG_SEGMENT) if key in self._tags}
        return store.find_run(own) if TAG_PARENT_RUN in own else None


def _points(record: Mapping[str, Any]) -> list[MetricPoint]:
    at_ms = int(record["wall_time_s"] * 1000)
    return [MetricPoint(name, value, record["step"], at_ms) for name, value in step_metrics(record).items()]


def _log_points(store: Store, run_id: str, *, points: Sequence[MetricPoint]) -> None:
    store.log_metrics(run_id, points)


def _groups(points_by_record: Sequence[Sequence[MetricPoint]]) -> Iterator[list[MetricPoint]]:
    """Whole records a call: the store then holds a step entirely or not at all."""
    group: list[MetricPoint] = []
    for points in points_by_record:
        if group and len(group) + len(points) > MAX_METRICS_PER_CALL:
            yield group
            group = []
        group.extend(points)
    if group:
        yield group


def _no_call(store: Store, run_id: str) -> None:
    """Opening the store is all."""
