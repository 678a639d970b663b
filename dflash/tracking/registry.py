"""The model registry: drafters as versions of a registered model, and the alias `champion`.

Invariant: a version's files are the exported folder as it lies on disk, safetensors and JSON, stored as plain artifacts of the
MLflow run that trained it: no model flavour, so nothing is ever pickled or imported when it is read back. A version is created
after its files are stored, in one call with its tags: half a registration leaves artifacts that the next try overwrites.
Hard decision: a drafter is known by the hash of its configuration and weights, kept as a tag. Registering it again finds the
version that exists, whichever process, run or machine asks.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash.errors import TrackingError
from dflash.tracking.names import CHAMPION, TAG_DRAFTER, TAG_PATH
from dflash.tracking.redact import redact_params
from dflash.tracking.store import StoreMissingError, prepare_environment, translated

MAX_TAG_LENGTH = 500
"""Of a reason; the store takes more, people do not."""

_TIMEOUT_VARIABLE = "MLFLOW_HTTP_REQUEST_TIMEOUT"
_UPLOAD_TIMEOUT_S = "600"
"""Of one request while weights travel: a few seconds, as everywhere else here, are not enough for gigabytes."""


@dataclass(frozen=True, slots=True)
class Version:
    """A version of the registered model: its number, the MLflow run that holds its files, and where in that run's artifacts."""

    number: str
    run_id: str
    path: str
    tags: Mapping[str, str]


class Registry:
    """A registered model of an MLflow store.

    Args:
        uri: database or HTTP(S) address of the store.
        model: name of the registered model; created with its first version.
    """

    def __init__(self, uri: str, *, model: str) -> None:
        prepare_environment()
        from mlflow.tracking import MlflowClient

        self.model = model
        with translated():
            self._client = MlflowClient(tracking_uri=uri)

    def holds_run(self, run_id: str) -> bool:
        """Whether the store has that run, not deleted."""
        try:
            with translated():
                return bool(self._client.get_run(run_id).info.lifecycle_stage == "active")
        except StoreMissingError:
            return False

    def find(self, drafter_sha256: str) -> Version | None:
        """The version of a drafter; the oldest, if there should be several."""
        with translated():
            found = self._client.search_model_versions(f"name = '{self.model}' and tags.{TAG_DRAFTER} = '{drafter_sha256}'")
        versions = sorted((int(each.version), each) for each in found)
        return _version(versions[0][1]) if versions else None

    def register(self, folder: Path, *, run_id: str, path: str, tags: Mapping[str, str]) -> Version:
        """Store a folder's files and create the version that names them.

        Args:
            folder: exported drafter.
            run_id: MLflow run that keeps the files.
            path: of the files in that run's artifacts.
            tags: `TAG_DRAFTER` among them.

        Raises:
            TrackingError: the store is away or refuses.
        """
        self.add_files(folder, run_id=run_id, path=path)
        described = redact_params({TAG_PATH: path, **tags})
        with translated():
            source = f"{self._client.get_run(run_id).info.artifact_uri}/{path}"
            self._ensure_model()
            made = self._client.create_model_version(self.model, source, run_id=run_id, tags=described)
        return _version(made)

    def add_files(self, folder: Path, *, run_id: str, path: str) -> None:
        """Store a folder's files (or one file) under a version's path; equal names are replaced."""
        with translated(), _patient():
            log = self._client.log_artifacts if folder.is_dir() else self._client.log_artifact
            log(run_id, str(folder), path)

    def download(self, version: Version, into: Path) -> Path:
        """Fetch a version's files into a folder that exists; returns where they lie."""
        with translated(), _patient():
            return Path(self._client.download_artifacts(version.run_id, version.path, str(into)))

    def read_text(self, version: Version, name: str) -> str | None:
        """One of a version's files; None if it has no such file."""
        path = f"{version.path}/{name}"
        with translated(), tempfile.TemporaryDirectory(prefix="dflash-registry-") as place:
            if path not in [entry.path for entry in self._client.list_artifacts(version.run_id, version.path)]:
                return None
            return Path(self._client.download_artifacts(version.run_id, path, place)).read_text(encoding="utf-8")

    def champion(self) -> Version | None:
        """The version with the alias, None before the first; a store that refuses to tell has not said that there is none."""
        try:
            with translated():
                number = self._client.get_registered_model(self.model).aliases.get(CHAMPION)
                return None if number is None else _version(self._client.get_model_version(self.model, number))
        except StoreMissingError:
            return None

    def crown(self, version: Version) -> None:
        """Give a version the alias; who had it loses it."""
        with translated():
            self._client.set_registered_model_alias(self.model, CHAMPION, version.number)

    def tag(self, version: Version, tags: Mapping[str, str]) -> None:
        """Set or replace tags of a version."""
        with translated():
            for key, value in redact_params(tags).items():
                self._client.set_model_version_tag(self.model, version.number, key, value[:MAX_TAG_LENGTH])

    def _ensure_model(self) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.get_registered_model(self.model)
        except MlflowException:
            try:
                self._client.create_registered_model(self.model)
            except MlflowException:
                # Another process may have made it in between; anything else fails again in the next line.
                self._client.get_registered_model(self.model)


@contextlib.contextmanager
def _patient() -> Iterator[None]:
    """Let requests take as long as weights need."""
    before = os.environ.get(_TIMEOUT_VARIABLE)
    os.environ[_TIMEOUT_VARIABLE] = _UPLOAD_TIMEOUT_S
    try:
        yield
    finally:
        if before is None:
            del os.environ[_TIMEOUT_VARIABLE]
        else:
            os.environ[_TIMEOUT_VARIABLE] = before


def _version(found: object) -> Version:
    tags = dict(getattr(found, "tags", None) or {})
    number, run_id = str(getattr(found, "version", "")), str(getattr(found, "run_id", "") or "")
    if TAG_PATH not in tags or not run_id:
        raise TrackingError(
            f"version {number} of the registered model was not registered here: it has no tag {TAG_PATH!r} and no run",
            remedy="move its alias by hand, or name another publish.registered_model",
        )
    return Version(number, run_id, tags[TAG_PATH], tags)
