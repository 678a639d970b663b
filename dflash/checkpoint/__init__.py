"""Checkpoints: durable writing, verified loading, the ledger of their states, retention."""

from dflash.checkpoint.choose import newest_durable, saved_states
from dflash.checkpoint.clean import Evidence, Transition, propose_transitions
from dflash.checkpoint.layout import LATEST, LATEST_CLEAN, list_checkpoints
from dflash.checkpoint.ledger import Ledger, clean_steps, current_states, is_legal, read_ledger
from dflash.checkpoint.load import LoadedCheckpoint, load_checkpoint, read_manifest, read_state, verify_checkpoint
from dflash.checkpoint.pointers import point_to, read_pointer
from dflash.checkpoint.remove import remove_aside, remove_checkpoint, remove_leftovers, set_aside
from dflash.checkpoint.retention import checkpoints_to_delete
from dflash.checkpoint.save import CheckpointContent, RunIdentity, save_checkpoint
from dflash.checkpoint.scan import NormJump, TensorScan, norm_jumps, scan_file, total_norm
from dflash.checkpoint.why import Explanation, LogEvidence, why_states
from dflash.checkpoint.writer import CheckpointWriter, WriterHooks

__all__ = [
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
    "RunIdentity",
    "TensorScan",
    "Transition",
    "WriterHooks",
    "checkpoints_to_delete",
    "clean_steps",
    "current_states",
    "is_legal",
    "list_checkpoints",
    "load_checkpoint",
    "newest_durable",
    "norm_jumps",
    "point_to",
    "propose_transitions",
    "read_ledger",
    "read_manifest",
    "read_pointer",
    "read_state",
    "remove_aside",
    "remove_checkpoint",
    "remove_leftovers",
    "save_checkpoint",
    "saved_states",
    "scan_file",
    "set_aside",
    "total_norm",
    "verify_checkpoint",
    "why_states",
]
