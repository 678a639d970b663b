"""Requests to the supervisor: files created once under their key, acknowledged beside them once executed.

Invariant: a request has one effect: an acknowledged one is never executed again, and one that was executed but not yet
acknowledged is harmless to execute twice (stopping a stopped trainer).
"""

from __future__ import annotations

import contextlib
import json
import logging
from datetime import UTC, datetime
from pathlib import Path

from dflash.errors import DataError
from dflash.records import ControlRequest, RollbackPlan, RunPaths, from_json, to_json
from dflash.storage import atomic_write_text, create_exclusively

logger = logging.getLogger(__name__)

ACK_SUFFIX = ".ack.json"

WITHOUT_EFFECT = ("refused:", "superseded:")
"""Beginnings of the outcomes of requests that were answered and not carried out."""


def pending_requests(paths: RunPaths) -> list[ControlRequest]:
    """Requests without an acknowledgement, oldest first; malformed ones are refused here."""
    unanswered = (file for file in _files(paths) if not _ack_file(paths, file.stem).exists())
    pending = [request for file in unanswered if (request := _read(paths, file)) is not None]
    return sorted(pending, key=lambda request: (request.requested_at, request.key))


def decisions(paths: RunPaths) -> list[RollbackPlan]:
    """What health checks have decided and requested, whether or not it was dealt with; a malformed request is none."""
    found = []
    for file in _files(paths):
        with contextlib.suppress(FileNotFoundError, DataError):  # taken away meanwhile, or refused, with a warning, as pending
            found.append(_parsed(file))
    return [request.plan for request in found if request.plan is not None]


def ask(paths: RunPaths, request: ControlRequest) -> bool:
    """Put a request to the run's supervisor; False if one of its key was put before (and perhaps dealt with)."""
    paths.requests_dir.mkdir(parents=True, exist_ok=True)
    return create_exclusively(paths.requests_dir / f"{request.key}.json", to_json(request, indent=2).encode())


def acknowledge(paths: RunPaths, key: str, *, outcome: str) -> None:
    """Note that the request `key` was dealt with."""
    payload = {"key": key, "outcome": outcome, "at": datetime.now(UTC).isoformat()}
    atomic_write_text(_ack_file(paths, key), json.dumps(payload, indent=2) + "\n")


def halted_by(paths: RunPaths) -> ControlRequest | None:
    """The request that halted this run, None if none did; a halted run is not continued as if it had crashed."""
    for ack in sorted(paths.requests_dir.glob(f"*{ACK_SUFFIX}")):
        file = ack.with_name(f"{ack.name.removesuffix(ACK_SUFFIX)}.json")
        try:
            request = _parsed(file)
        except (FileNotFoundError, DataError):  # taken away by a person, or refused as what it is
            continue
        if request.action == "halt" and not _outcome(ack).startswith(WITHOUT_EFFECT):
            return request
    return None


def _outcome(ack: Path) -> str:
    """What became of a request; empty if that cannot be read, which takes nothing back."""
    try:
        return str(json.loads(ack.read_bytes())["outcome"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read, its request counts as carried out: %s: %s", ack, type(error).__name__, error)
        return ""


def _files(paths: RunPaths) -> list[Path]:
    """Files of requests, answered or not."""
    found = sorted(paths.requests_dir.glob("*.json")) if paths.requests_dir.is_dir() else []
    return [file for file in found if not file.name.endswith(ACK_SUFFIX) and not file.name.startswith(".")]


def _read(paths: RunPaths, file: Path) -> ControlRequest | None:
    try:
        return _parsed(file)
    except FileNotFoundError:  # taken away by a person since it was listed: no request any more
        return None
    except DataError as error:
        logger.warning("refused a request: %s", error)
        acknowledge(paths, file.stem, outcome=f"refused: {error.what}")
        return None


def _parsed(file: Path) -> ControlRequest:
    """The request in a file, which has to be named after its key.

    Raises:
        DataError: it is none.
    """
    request = from_json(ControlRequest, file.read_bytes(), origin=str(file))
    if request.key != file.stem:
        raise DataError(f"{file} holds the request {request.key!r}", remedy="name the file after its key")
    return request


def _ack_file(paths: RunPaths, key: str) -> Path:
    return paths.requests_dir / f"{key}{ACK_SUFFIX}"
