"""The checkpoint writer: the trainer is blocked only while its state is copied into buffers that already exist.

Invariant: at most one save is in flight; one that comes while another is being written is skipped and reported, never
queued. A failing disk fails that save and not the training; any other error in the thread is a defect and stops the
replica. Hard decision: a thread, not a process: hashing and writing release the interpreter lock, and copying into
preallocated buffers blocks 300 MB of state for about 40 ms where fresh clones take 200.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from dflash.checkpoint.save import CheckpointContent, RunIdentity, save_checkpoint
from dflash.errors import CheckpointError, DflashError
from dflash.records import EventName, TrainerState

logger = logging.getLogger(__name__)

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class WriterHooks:
    """What the writer calls.

    Attributes:
        before_commit: on the writer's thread before anything is written (puts the log on disk up to the snapshot).
        on_event: (event, step, details) for `save_*`; from both threads.
        on_defect: an unexpected error of the writer's thread.
        on_operation: a name before each file operation.

    """

    before_commit: Callable[[], None]
    on_event: Callable[[EventName, int, Mapping[str, Any]], None]
    on_defect: Callable[[BaseException], None]
    on_operation: Callable[[str], None]


class CheckpointWriter:
    """Snapshots live tensors and writes them on its own thread."""

    def __init__(self, directory: Path, *, identity: RunIdentity, drafter: Tensors, optimizer: Tensors, hooks: WriterHooks) -> None:
        """Allocate buffers for the live tensors `drafter` and `optimizer` and start the thread."""
        self._directory = directory
        self._identity = identity
        self._hooks = hooks
        self._live = {"drafter": dict(drafter), "optimizer": dict(optimizer)}
        self._buffers = {group: _buffers_like(tensors) for group, tensors in self._live.items()}
        self._state: TrainerState | None = None
        self._failure: BaseException | None = None
        self._durable_step: int | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
        self._thread.start()

    @property
    def buffer_bytes(self) -> int:
        """Host memory of the snapshot."""
        return sum(buffer.numel() * buffer.element_size() for group in self._buffers.values() for buffer in group.values())

    def save(self, state: TrainerState, *, wait: bool) -> bool:
        """Snapshot the live tensors and have them written as `step-N`.

        Args:
            state: progress that belongs to the tensors as they are now.
            wait: first wait for a save in flight, then until this step is durable (the last save of a process).

        Returns:
            False if another save was in flight and this one was skipped.

        Raises:
            CheckpointError: `wait` was set and the save failed.
        """
        with self._changed:
            if self._state is not None and not wait:
                self._hooks.on_event("save_skipped", state.step, {"in_flight_step": self._state.step})
                return False
            self._changed.wait_for(lambda: self._state is None)
            if self._durable_step == state.step:
                return True
            begin_s = time.monotonic()
            self._hooks.on_event("save_begin", state.step, {})
            self._snapshot()
            blocked_s = time.monotonic() - begin_s
            self._hooks.on_event("save_staged", state.step, {"blocked_s": blocked_s, "bytes": self.buffer_bytes})
            self._state, self._failure = state, None
            self._changed.notify_all()
            if wait:
                self._changed.wait_for(lambda: self._state is None)
                if self._failure is not None:
                    raise CheckpointError(
                        f"checkpoint step-{state.step} could not be written: {self._failure}",
                        remedy=f"make room or mend {self._directory}; a new start continues from the newest durable checkpoint",
                    ) from self._failure
        return True

    def close(self) -> None:
        """Wait for a save in flight, then end the thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._state is None)
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _snapshot(self) -> None:
        with torch.no_grad():
            for group, buffers in self._buffers.items():
                for name, buffer in buffers.items():
                    buffer.copy_(self._live[group][name], non_blocking=True)
        for device in {tensor.device for group in self._live.values() for tensor in group.values()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._state is not None or self._closing)
                state = self._state
            if state is None:
                return
            failure: BaseException | None = None
            try:
                self._write(state)
            except (OSError, DflashError) as error:
                logger.error("checkpoint step-%d failed: %s", state.step, error)
                self._hooks.on_event("save_failed", state.step, {"error": str(error)})
                failure = error
            except BaseException as error:  # noqa: BLE001 - handed to the replica, which stops and raises it
                failure = error
                self._hooks.on_defect(error)
            with self._changed:
                self._state, self._failure = None, failure
                if failure is None:
                    self._durable_step = state.step
                self._changed.notify_all()

    def _write(self, state: TrainerState) -> None:
        begin_s = time.monotonic()
        self._hooks.before_commit()
        content = CheckpointContent(
            state=state, identity=self._identity, drafter=self._buffers["drafter"], optimizer=self._buffers["optimizer"]
        )
        manifest = save_checkpoint(
            self._directory, content, created_at=datetime.now(UTC).isoformat(), on_operation=self._hooks.on_operation
        )
        details = {
            "write_s": time.monotonic() - begin_s,
            "bytes": sum(entry.size_bytes for entry in manifest.files),
            "finite": manifest.finite,
        }
        self._hooks.on_event("save_durable", state.step, details)


def _buffers_like(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Contiguous host tensors of the same shapes, pinned where the live ones are on a GPU."""
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
        for name, tensor in tensors.items()
    }
