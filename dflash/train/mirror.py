"""Durable checkpoints copied to a store in the background, by a thread of the supervisor.

Invariant: training never waits for the store and never ends because of it: what fails is tried again after ever longer
waits, always the newest checkpoint, and the supervisor's log and `control/mirror.json` say what is there and what is wrong.
A checkpoint is skipped where a newer one is durable before its copy has begun. Retention: the newest
`checkpoint.keep_remote` copies stay, and the newest clean one; what a rollback abandoned goes at once.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from dflash.checkpoint import clean_steps, list_checkpoints, read_ledger
from dflash.checkpoint.remote import copies_to_delete, delete_copy, list_copies, upload_checkpoint
from dflash.config import CheckpointConfig
from dflash.errors import CheckpointError, StorageError
from dflash.records import RollbackEntry, RunPaths
from dflash.storage import Store, atomic_write_text, open_store

logger = logging.getLogger(__name__)

_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0


class Mirror:
    """Copies the newest durable checkpoint whenever there is a new one."""

    def __init__(self, paths: RunPaths, store: Store, *, keep: int, on_object: Callable[[str], None]) -> None:
        """Start the thread; `on_object` is called before each object that is sent."""
        self._paths = paths
        self._store = store
        self._keep = keep
        self._on_object = on_object
        self._wanted: int | None = None
        self._copied: int | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()

    @property
    def uploading(self) -> int | None:
        """Step that is wanted in the store and not there yet."""
        with self._changed:
            return self._wanted if self._wanted != self._copied else None

    def notice(self) -> None:
        """Look for a newer checkpoint."""
        newest = max(list_checkpoints(self._paths.checkpoints_dir), default=None)
        with self._changed:
            if newest != self._wanted:
                self._wanted = newest
                self._changed.notify_all()

    def close(self, *, timeout_s: float) -> bool:
        """End the thread, giving a copy in progress some time; returns whether the newest checkpoint is in the store."""
        with self._changed:
            done = self._changed.wait_for(lambda: self._wanted == self._copied, timeout=timeout_s)
            self._closing = True
            self._changed.notify_all()
        if not done:
            # The first try may not even have failed yet: whoever reads the file must not take silence for success.
            self._report(error=f"step-{self._wanted} was not in the store when the run ended")
        return done

    def _run(self) -> None:
        wait_s = _FIRST_WAIT_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._wanted != self._copied)
                step = self._wanted
                if self._closing or step is None:
                    return
            try:
                self._copy(self._paths.checkpoint(step))
            except CheckpointError as error:
                logger.info("checkpoint step-%d is not copied: %s", step, error.what)
            except (OSError, StorageError) as error:
                self._report(error=str(error))
                logger.warning("copying step-%d to %s failed, next try in %.0f s: %s", step, self._store.uri, wait_s, error)
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, timeout=wait_s)
                wait_s = min(_LONGEST_WAIT_S, 2 * wait_s)
                continue
            wait_s = _FIRST_WAIT_S
            with self._changed:
                self._copied = step
                self._changed.notify_all()

    def _copy(self, folder: Path) -> None:
        begin_s = time.monotonic()
        copy = upload_checkpoint(self._store, folder, on_object=self._on_object)
        rollbacks = [line for line in read_ledger(self._paths.ledger) if isinstance(line, RollbackEntry)]
        clean = clean_steps(self._paths.ledger)
        for doomed in copies_to_delete(list_copies(self._store), keep=self._keep, clean=clean, rollbacks=rollbacks):
            delete_copy(self._store, doomed)
        logger.info("step-%d is in %s after %.1f s", copy.step, self._store.uri, time.monotonic() - begin_s)
        self._report(error=None)

    def _report(self, *, error: str | None) -> None:
        copies: list[list[int]] = []
        if error is None:
            copies = [[copy.step, copy.segment] for copy in list_copies(self._store)]
        payload = {"store": self._store.uri, "copies": copies, "error": error, "at": time.time()}
        try:
            atomic_write_text(self._paths.control_dir / "mirror.json", json.dumps(payload) + "\n")
        except StorageError as problem:  # a full local disk: copying goes on, and nobody's own error is hidden by this one
            logger.warning("the state of the copies is not noted: %s", problem)


def open_mirror(paths: RunPaths, rule: CheckpointConfig, *, on_object: Callable[[str], None]) -> Mirror | None:
    """The mirror of a run, None where none is configured.

    Raises:
        StorageError: the address is malformed.
    """
    if rule.store is None:
        return None
    return Mirror(paths, run_store(rule.store, paths), keep=rule.keep_remote, on_object=on_object)


def run_store(location: str, paths: RunPaths) -> Store:
    """Where the copies of a run lie below `checkpoint.store`."""
    return open_store(f"{location.rstrip('/')}/{paths.root.name}")
