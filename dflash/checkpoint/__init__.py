"""Checkpoints: durable writing, verified loading, the ledger of their states, retention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash.checkpoint.best import best_checkpoint
from dflash.checkpoint.choose import newest_durable, saved_states
from dflash.checkpoint.clean import Evidence, Transition, propose_transitions
from dflash.checkpoint.layout import BEST, LATEST, LATEST_CLEAN, list_checkpoints
from dflash.checkpoint.ledger import Ledger, clean_steps, current_states, is_legal, read_ledger
from dflash.checkpoint.load import LoadedCheckpoint, load_checkpoint, load_drafter, read_manifest, read_state, verify_checkpoint
from dflash.checkpoint.pointers import point_to, read_pointer, remove_pointer
from dflash.checkpoint.probes import (
    ProbeFile,
    ProbesHeldError,
    ProbeView,
    ProbeWriter,
    hold_probes,
    outcomes,
    probe_is_due,
    probe_view,
    read_probes,
    tries,
)
from dflash.checkpoint.remove import remove_aside, remove_checkpoint, remove_leftovers, set_aside
from dflash.checkpoint.retention import checkpoints_to_delete
from dflash.lazy import import_on_use

if TYPE_CHECKING:
    from dflash.checkpoint.save import CheckpointContent, RunIdentity, save_checkpoint
    from dflash.checkpoint.scan import NormJump, TensorScan, norm_jumps, scan_file, total_norm
    from dflash.checkpoint.why import Explanation, LogEvidence, why_states
    from dflash.checkpoint.writer import CheckpointWriter, WriterHooks

_HOMES = {
    "CheckpointContent": "save",
    "CheckpointWriter": "writer",
    "Explanation": "why",
    "LogEvidence": "why",
    "NormJump": "scan",
    "RunIdentity": "save",
    "TensorScan": "scan",
    "WriterHooks": "writer",
    "norm_jumps": "scan",
    "save_checkpoint": "save",
    "scan_file": "scan",
    "total_norm": "scan",
    "why_states": "why",
}
"""Modules that import torch, which the health check and the ledger's readers do without."""

__all__ = [
    "BEST",
    "LATEST",
    "LATEST_CLEAN",
    "CheckpointContent",
    "CheckpointWriter",
    "Evidence",
    "Explanation",
    "Ledger",
    "LoadedCheckpoint",
    "LogEvidence",
    "NormJump",
    "ProbeFile",
    "ProbeView",
    "ProbesHeldError",
    "ProbeWriter",
    "RunIdentity",
    "TensorScan",
    "Transition",
    "WriterHooks",
    "best_checkpoint",
    "checkpoints_to_delete",
    "clean_steps",
    "current_states",
    "hold_probes",
    "is_legal",
    "list_checkpoints",
    "load_checkpoint",
    "load_drafter",
    "newest_durable",
    "norm_jumps",
    "outcomes",
    "point_to",
    "probe_is_due",
    "probe_view",
    "propose_transitions",
    "read_ledger",
    "read_manifest",
    "read_pointer",
    "read_probes",
    "read_state",
    "remove_aside",
    "remove_checkpoint",
    "remove_leftovers",
    "remove_pointer",
    "save_checkpoint",
    "saved_states",
    "scan_file",
    "set_aside",
    "total_norm",
    "tries",
    "verify_checkpoint",
    "why_states",
]

__getattr__ = import_on_use(__name__, _HOMES)
