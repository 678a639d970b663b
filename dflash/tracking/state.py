"""What a run's folder remembers of its MLflow run: the id, and how far the log has been forwarded.

Invariant: the offset is written after the store has taken the records before it, never ahead of it. `sending` is
written before, so that after a crash between the two the store is asked what it holds, and nothing is logged twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash.records import from_json, to_json
from dflash.storage import atomic_write_text

TRACKING_SCHEMA_VERSION = 1
NO_STEP = -1


@dataclass(frozen=True, slots=True)
class TrackingState:
    """Content of `tracking.json`.

    Attributes:
        store: the store's URI without credentials; another store means another MLflow run.
        log_offset_bytes: everything before it in the training log is in the store.
        last_step: highest optimizer step known to be in the store, -1 for none.
        sending: records behind the offset were being sent; some of them may be in the store.
        segment_offset_bytes: where the segment begins in the log; a run that was deleted gets it again from there.

    """

    store: str
    experiment: str
    run_id: str
    segment: int
    log_offset_bytes: int
    last_step: int
    sending: bool
    segment_offset_bytes: int = 0
    schema_version: int = TRACKING_SCHEMA_VERSION


def load_state(path: Path) -> TrackingState | None:
    """Read the state, None if the run was never tracked."""
    if not path.is_file():
        return None
    return from_json(TrackingState, path.read_text(encoding="utf-8"), origin=str(path))


def save_state(path: Path, state: TrackingState) -> None:
    """Replace the state durably."""
    atomic_write_text(path, to_json(state, indent=2) + "\n")
