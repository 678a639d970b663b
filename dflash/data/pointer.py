"""`data.json` of a run: which data set it trains on."""

from __future__ import annotations

import json
from dataclasses import dataclass

from dflash.errors import RunStateError, StorageError
from dflash.records import RunPaths
from dflash.storage import get_bytes


@dataclass(frozen=True, slots=True)
class DataPointer:
    """The data set that a run trains on: a folder or `s3://bucket/prefix`, and which version of it."""

    location: str
    fingerprint: str


def read_data_pointer(paths: RunPaths) -> DataPointer:
    """Which data set a run trains on.

    Raises:
        RunStateError: the run was not prepared.
    """
    try:
        raw = json.loads(get_bytes(paths.data_pointer))
        return DataPointer(location=str(raw["dir"]), fingerprint=str(raw["fingerprint"]))
    except (StorageError, ValueError, KeyError, TypeError) as error:
        raise RunStateError(
            f"{paths.data_pointer} is missing or malformed", remedy="prepare the data first (python -m dflash data prepare)"
        ) from error
