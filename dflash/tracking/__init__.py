"""The one door to MLflow: it may be slow, away or refusing, and training never notices."""

from dflash.tracking.forward import LogForwarder
from dflash.tracking.history import read_history
from dflash.tracking.names import evaluation_metrics, step_metrics, sweep_metrics
from dflash.tracking.open import open_tracker, store_uri
from dflash.tracking.redact import redact_text
from dflash.tracking.registry import Registry, Version
from dflash.tracking.state import load_state
from dflash.tracking.tracker import MlflowTracker, NullTracker, RunStatus, Tracker

__all__ = [
    "LogForwarder",
    "MlflowTracker",
    "NullTracker",
    "Registry",
    "RunStatus",
    "Tracker",
    "Version",
    "evaluation_metrics",
    "load_state",
    "open_tracker",
    "read_history",
    "redact_text",
    "step_metrics",
    "store_uri",
    "sweep_metrics",
]
