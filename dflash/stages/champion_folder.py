"""The champion as a folder again: to serve it, or to decode beside it (`evaluate.baselines`, `evaluate --drafter`).

Invariant: what is fetched is what was registered, by the hash on its tag, or it does not appear under the name that was asked for.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dflash.errors import DrafterError, RunStateError, TrackingError
from dflash.model.export_swap import replace_folder
from dflash.stages.publish_audit import is_published_file
from dflash.stages.register import drafter_sha256, open_registry
from dflash.stages.run import Run
from dflash.tracking import Registry, Version
from dflash.tracking.names import TAG_DRAFTER


@dataclass(frozen=True, slots=True)
class Champion:
    """The champion of a run's registered model; `folder` is None where it was not fetched."""

    model: str
    version: str
    run: str
    step: str
    acceptance_length: str
    reason: str
    folder: Path | None


def champion_of(run: Run, *, output: Path | None) -> Champion:
    """Who the champion is, and its files in a new folder if one is named.

    Raises:
        RunStateError: there is none yet.
        DrafterError: the folder exists already, or cannot be made.
        TrackingError: the store is away, or what it holds is not what was registered.
    """
    registry = open_registry(run)
    version = registry.champion()
    if version is None:
        raise RunStateError(
            f"registered model {registry.model} has no champion",
            remedy=f"python -m dflash select {run.paths.root}, or publish with --register",
        )
    if output is not None:
        try:
            _fetch(registry, version, output)
        except OSError as error:
            raise DrafterError(
                f"{output} cannot be written: {error}", remedy="name a folder that can be, on a disk with room"
            ) from error
    run_name, step, length, reason = (
        version.tags.get(name, "") for name in ("run", "step", "acceptance_length", "champion_reason")
    )
    return Champion(registry.model, version.number, run_name, step, acceptance_length=length, reason=reason, folder=output)


def _fetch(registry: Registry, version: Version, output: Path) -> None:
    place = output.resolve()
    if place.exists():
        raise DrafterError(f"{output} exists already", remedy="name a new folder")
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent) as beside:
        stored = registry.download(version, Path(beside))
        fetched = Path(beside) / "drafter"
        fetched.mkdir()
        for file in stored.iterdir():
            if is_published_file(file):
                shutil.move(os.fspath(file), fetched)
        if drafter_sha256(fetched) != version.tags.get(TAG_DRAFTER):
            raise TrackingError(
                f"the files of version {version.number} of {registry.model} are not those that were registered",
                remedy="register the drafter again, and find out who writes to the artifact store",
            )
        replace_folder(fetched, place)
