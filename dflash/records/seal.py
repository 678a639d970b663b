"""Records that seal themselves: a JSON object with the hash of everything else in it.

Invariant: of a sealed text no single value can change, by a fault of a disk or by hand, without being noticed. Files are hashed
by the manifests that name them; a manifest has nobody above it.
Hard decision: the hash is over the values, in one canonical form, not over the text, so indentation is free.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from dflash.errors import DataError
from dflash.records.codec import from_dict, json_object, to_dict

RecordT = TypeVar("RecordT")

SEAL = "seal"
"""Key of the hash: no record has a field of this name."""


def to_sealed_json(record: Any) -> str:
    """A record as indented JSON text, sealed; refuses NaN and infinities."""
    return sealed(to_dict(record))


def from_sealed_json(kind: type[RecordT], text: str | bytes, *, origin: str) -> RecordT:
    """Parse what `to_sealed_json` wrote.

    Args:
        kind: frozen dataclass.
        text: JSON.
        origin: file or object name, for errors.

    Raises:
        SchemaVersionError: another schema version.
        DataError: not JSON, fields do not fit, or a value is not the one that was written.
    """
    raw = json_object(text, origin=origin)
    record = from_dict(kind, {key: value for key, value in raw.items() if key != SEAL}, origin=origin)
    _check(raw, origin)
    return record


def sealed(values: Mapping[str, Any]) -> str:
    """An object as indented JSON text, sealed."""
    return json.dumps({**values, SEAL: _seal_of(values)}, indent=2, allow_nan=False) + "\n"


def unsealed(text: str | bytes, *, origin: str) -> dict[str, Any]:
    """The values of a sealed object.

    Raises:
        DataError: not JSON, or a value is not the one that was written.
    """
    raw = json_object(text, origin=origin)
    _check(raw, origin)
    return {key: value for key, value in raw.items() if key != SEAL}


def _check(raw: Mapping[str, Any], origin: str) -> None:
    if raw.get(SEAL) != _seal_of({key: value for key, value in raw.items() if key != SEAL}):
        raise DataError(
            f"{origin} is damaged: its values do not have the hash that it says ({SEAL})",
            remedy="restore the file or build it again",
        )


def _seal_of(values: Mapping[str, Any]) -> str:
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
