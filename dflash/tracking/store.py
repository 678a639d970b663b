"""The only calls into MLflow; everything it may raise becomes one of two errors.

`StoreUnreachableError` means "try again later", `StoreRefusalError` means "this value will never be taken".
MLflow costs 3 s and 170 MB to import, so it is imported when a store is first opened and nowhere else.
Hard decision: its HTTP client retries for minutes by default; here a request fails within seconds, because the
caller sits in a supervisor's loop and keeps everything unsent in the training log anyway.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dflash.errors import TrackingError
from dflash.records import DataManifest, to_json
from dflash.tracking.names import TRAIN_SKIPPED
from dflash.tracking.redact import redact_text
from dflash.tracking.state import NO_STEP

ItemT = TypeVar("ItemT")

MAX_PARAMS_PER_CALL = 100
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
"""Opens the experiment's page on its training curves; without it the user interface shows an empty page of traces."""

MAX_METRICS_PER_CALL = 1000
MAX_DIGEST_LENGTH = 36  # limits of MLflow's API

_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_MISSING = "RESOURCE_DOES_NOT_EXIST"
_REFUSALS = frozenset({"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "PERMISSION_DENIED", "RESOURCE_ALREADY_EXISTS", _MISSING})


class StoreUnreachableError(TrackingError):
    """The store did not answer; the same call may succeed later."""


class StoreRefusalError(TrackingError):
    """The store answered and will never take this value."""


class StoreMissingError(StoreRefusalError):
    """The store answered that it holds no such thing: the one refusal that says that there is none."""


def prepare_environment() -> None:
    """What MLflow reads when it is imported; called before that."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """One value of one metric."""

    name: str
    value: float
    step: int
    timestamp_ms: int


class Store:
    """An experiment of an MLflow store.

    Args:
        uri: database or HTTP(S) address of the store.
        experiment: name; created if absent.
        artifact_root: folder of the experiment's artifacts if it is created here; None leaves it to a server.
    """

    def __init__(self, uri: str, *, experiment: str, artifact_root: Path | None) -> None:
        prepare_environment()
        from mlflow import entities
        from mlflow.tracking import MlflowClient

        logging.getLogger("alembic").setLevel(logging.WARNING)
        self._entities: Any = entities
        with translated():
            self._client = MlflowClient(tracking_uri=uri)
            self._experiment_id = self._find_experiment(experiment, artifact_root)

    def _find_experiment(self, name: str, artifact_root: Path | None) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            location = artifact_root.resolve().as_uri() if artifact_root is not None else None
            try:
                return str(self._client.create_experiment(name, artifact_location=location, tags=EXPERIMENT_TAGS))
            except _mlflow_exception():
                # Another run may have created it in between; anything else fails again in the next line.
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        if found.lifecycle_stage != "active":
            self._client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)

    def begin_run(self, *, name: str, tags: Mapping[str, str]) -> str:
        """Create a run and return its id."""
        with translated():
            return str(self._client.create_run(self._experiment_id, run_name=name, tags=dict(tags)).info.run_id)

    def find_run(self, tags: Mapping[str, str]) -> str | None:
        """Id of a run that has not been deleted and has all these tags; None if there is none."""
        wanted = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        with translated():
            found = self._client.search_runs([self._experiment_id], filter_string=wanted, max_results=1)
        return str(found[0].info.run_id) if found else None

    def continue_run(self, run_id: str) -> str | None:
        """Mark a run as running again; returns the status it had, None if it does not exist (any more)."""
        try:
            with translated():
                found = self._client.get_run(run_id).info
                if found.lifecycle_stage != "active":
                    return None
                self._client.update_run(run_id, status="RUNNING")
        except StoreMissingError:
            return None
        return str(found.status)

    def last_step(self, run_id: str) -> int:
        """The highest optimizer step that a run holds, -1 for none; reads a whole curve, so ask only when in doubt."""
        with translated():
            history = self._client.get_metric_history(run_id, TRAIN_SKIPPED)  # the one metric that every step has
        return max((int(point.step) for point in history), default=NO_STEP)

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        """Log parameters; they are immutable, so repeating the same ones is harmless."""
        with translated():
            for chunk in _chunks(list(params.items()), MAX_PARAMS_PER_CALL):
                self._client.log_batch(run_id, params=[self._entities.Param(key, value) for key, value in chunk])

    def log_metrics(self, run_id: str, points: Sequence[MetricPoint]) -> None:
        """Log points in batches of a thousand (5 100 points a second on SQLite; one by one it is 51)."""
        with translated():
            for chunk in _chunks(points, MAX_METRICS_PER_CALL):
                metrics = [self._entities.Metric(p.name, p.value, p.timestamp_ms, p.step) for p in chunk]
                self._client.log_batch(run_id, metrics=metrics)

    def log_dataset(self, run_id: str, manifest: DataManifest, location: str, preview_html: str | None) -> None:
        """Attach a data set by its manifest (digest, place, sizes), the manifest itself, and the page that shows samples."""
        profile = {
            "samples": manifest.samples,
            "tokens": manifest.tokens,
            "supervised_tokens": manifest.supervised_tokens,
            "fingerprint": manifest.fingerprint,
            "target_fingerprint": manifest.target_fingerprint,
        }
        dataset = self._entities.Dataset(
            name=manifest.fingerprint[:16],
            digest=manifest.fingerprint[:MAX_DIGEST_LENGTH],
            source_type="s3" if location.startswith("s3://") else "local",
            source=json.dumps({"uri": location}),
            profile=json.dumps(profile),
        )
        with translated():
            self._client.log_inputs(run_id, datasets=[self._entities.DatasetInput(dataset, [])])
            self._client.log_text(run_id, to_json(manifest, indent=2), "data/manifest.json")
            if preview_html is not None:
                self._client.log_text(run_id, preview_html, "data/preview.html")

    def log_artifact(self, run_id: str, path: Path, folder: str) -> None:
        """Copy a file (or a folder's content) into the run's artifacts under `folder`."""
        with translated():
            log = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
            log(run_id, str(path), folder)

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set or replace tags."""
        with translated():
            for chunk in _chunks(list(tags.items()), MAX_PARAMS_PER_CALL):
                self._client.log_batch(run_id, tags=[self._entities.RunTag(key, value) for key, value in chunk])

    def end_run(self, run_id: str, status: str) -> None:
        """Close a run with MLflow's status (`FINISHED`, `FAILED`, `KILLED`)."""
        with translated():
            self._client.set_terminated(run_id, status=status)


def _chunks(items: Sequence[ItemT], size: int) -> Iterator[Sequence[ItemT]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _mlflow_exception() -> type[Exception]:
    from mlflow.exceptions import MlflowException

    error_class: type[Exception] = MlflowException
    return error_class


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Turn whatever MLflow raises into one of our two errors; without its cause, whose text may hold the store's password."""
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except _mlflow_exception() as error:
        code = getattr(error, "error_code", "")
        refused = StoreMissingError if code == _MISSING else StoreRefusalError
        kind = refused if code in _REFUSALS else StoreUnreachableError
        raise kind(f"MLflow: {_first_line(error)}", remedy="see the store's own log") from None
    except (OSError, SQLAlchemyError) as error:
        raise StoreUnreachableError(f"MLflow: {_first_line(error)}", remedy="check that the store is up") from None


def _first_line(error: Exception) -> str:
    return redact_text(str(error).strip().partition("\n")[0]) or type(error).__name__
