"""A run's folder: what it was made from, who trains it now.

Invariant: a run's training identity (everything that decides its numbers) never changes; what only observes or schedules
(health, evaluation, tracking, devices, queue bounds, save interval) may.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dflash.config import Config, dump_config, flat_params, load_config
from dflash.data.pointer import read_data_pointer
from dflash.errors import RunStateError, StorageError
from dflash.records import RunPaths
from dflash.storage import atomic_write_text, get_bytes, open_store

logger = logging.getLogger(__name__)

OBSERVING_KEYS = (
    "run.name", "run.root", "cluster.targets_per_replica", "cluster.share_device", "cluster.shard", "cluster.device_memory_bytes",
    "cluster.nodes", "cluster.rendezvous", "cluster.network_interface", "cluster.collective_timeout_s",
    "health.", "rollback.", "evaluate.", "probe.", "publish.", "tracking.", "drill.", "checkpoint.", "train.queues.",
    "train.max_nonfinite_in_row", "train.heartbeat_s", "train.log_heartbeat_s",
    "train.max_restarts", "train.restart_", "train.stall_s",
    "target.local_files_only", "data.reader.", "data.runner", "data.workers", "data.store",
)  # fmt: skip
"""Keys (or prefixes of keys) that may differ between two starts of one run."""

_LOCK_TRIES = 25
_LOCK_RETRY_S = 0.02
"""A probe of the lock holds it for microseconds: whoever wants it for good tries again for half a second."""


def training_identity(config: Config) -> dict[str, str]:
    """The flat configuration without what only observes or schedules."""
    return {key: value for key, value in flat_params(config).items() if not key.startswith(OBSERVING_KEYS)}


def training_hash(config: Config) -> str:
    """SHA-256 (hex) of the training identity."""
    return hashlib.sha256(json.dumps(training_identity(config), sort_keys=True).encode()).hexdigest()


def prepare_run(config: Config, paths: RunPaths, *, location: str | Path, fingerprint: str) -> None:
    """Make a run's folder ready for the supervisor, or check that it is still the same run.

    Args:
        config: resolved configuration.
        paths: the run's folder, created if missing.
        location: of the data set.
        fingerprint: its fingerprint.

    Raises:
        RunStateError: the folder belongs to another configuration or another data set; the message names the difference.
    """
    if paths.config.is_file():
        _refuse_other_config(config, load_config(paths.config), paths)
    if paths.data_pointer.is_file():
        known = read_data_pointer(paths)
        if known.fingerprint != fingerprint:
            raise RunStateError(
                f"run {paths.root} trains on data set {known.fingerprint[:16]}, not on {fingerprint[:16]}",
                remedy="use another run.name for the new data set, or remove the run's folder",
            )
    paths.root.mkdir(parents=True, exist_ok=True)
    paths.requests_dir.mkdir(parents=True, exist_ok=True)
    paths.checkpoints_dir.mkdir(parents=True, exist_ok=True)
    atomic_write_text(paths.config, dump_config(config))
    pointer = {"dir": open_store(location).uri, "fingerprint": fingerprint}
    atomic_write_text(paths.data_pointer, json.dumps(pointer, indent=2) + "\n")


def run_is_live(paths: RunPaths) -> bool:
    """Whether a supervisor trains this run now."""
    try:
        with paths.lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


@contextlib.contextmanager
def hold_run(paths: RunPaths) -> Iterator[None]:
    """Be the run's one supervisor while the block runs.

    Raises:
        RunStateError: another one is.
    """
    paths.control_dir.mkdir(parents=True, exist_ok=True)
    with paths.lock.open("ab") as file:
        if not any(_try_lock(file.fileno()) for _ in range(_LOCK_TRIES)):
            raise RunStateError(
                f"run {paths.root} is being trained by another supervisor ({_holder(paths)})",
                remedy="wait for it or stop it; two supervisors on one run would destroy it",
            )
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(_LOCK_RETRY_S)
        return False
    return True


def _holder(paths: RunPaths) -> str:
    try:
        return f"pid {json.loads(get_bytes(paths.heartbeat))['pid']}"
    except (StorageError, ValueError, KeyError, TypeError):
        return "its heartbeat is not readable"


def _refuse_other_config(config: Config, known: Config, paths: RunPaths) -> None:
    differences = show_differences(training_identity(known), training_identity(config))
    if differences:
        raise RunStateError(
            f"run {paths.root} was made from another configuration:\n  " + "\n  ".join(differences),
            remedy="use another run.name for the changed configuration, undo the change, or let the run go on with it "
            "(`train --accept-changes`)",
        )
    for line in show_differences(flat_params(known), flat_params(config)):
        logger.info("run %s continues with a changed setting that does not touch its numbers: %s", paths.root, line)


def differing_keys(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Keys whose values differ, in order."""
    return [key for key in sorted(known.keys() | wanted.keys()) if known.get(key) != wanted.get(key)]


def show_differences(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """One line for every key that differs, `key: old -> new`."""
    return [f"{key}: {known.get(key, '(absent)')} -> {wanted.get(key, '(absent)')}" for key in differing_keys(known, wanted)]
