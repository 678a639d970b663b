"""The checkpoint writer: the trainer is blocked only while its state is copied into buffers that already exist.

Invariant: at most one save is in flight; one that comes while another is being written is skipped and reported, never
queued. A failing or hanging disk costs saves and never the training: a failed write is reported and tried again from the
same snapshot until a newer one takes its place; one that hangs is abandoned, and the next save gets new buffers. Any other
error of the writing thread is a defect and stops the replica.
Hard decisions: a thread, not a process: hashing and writing release the interpreter lock, and copying into preallocated
buffers blocks 300 MB of state for about 40 ms where fresh clones take 200. And a thread a save: one that hangs inside the
kernel cannot be ended, only left behind; so that memory stays bounded, no second one is left behind before the first is gone.
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
from dflash.checkpoint.write_times import WriteTimes
from dflash.config import CheckpointConfig
from dflash.errors import CheckpointError, DflashError
from dflash.records import EventName, TrainerState

logger = logging.getLogger(__name__)

Tensors = Mapping[str, torch.Tensor]
Buffers = dict[str, dict[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class WriterHooks:
    """What the writer calls.

    Attributes:
        before_snapshot: before live tensors are copied, and before each is copied `whole`, which gives all of it where it is
            spread over several processes; both on the trainer's thread.
        before_commit: on the writing thread before anything is written (puts the log on disk up to the snapshot).
        on_event: (event, step, details) for `save_*`; from both threads.
        on_defect: an unexpected error of the writing thread.
        on_operation: a name before each file operation.

    """

    before_snapshot: Callable[[], None]
    whole: Callable[[torch.Tensor], torch.Tensor]
    before_commit: Callable[[], None]
    on_event: Callable[[EventName, int, Mapping[str, Any]], None]
    on_defect: Callable[[BaseException], None]
    on_operation: Callable[[str], None]


class _AbandonedError(DflashError):
    """The write was given up; nothing of it may become visible any more."""


@dataclass(slots=True)
class _Save:
    """One save; the fields change under the writer's lock only.

    Attributes:
        retrying: a write failed, and the next try waits.
        abandoned: the thread is to end as soon as it can.
        done: the thread has ended.

    """

    state: TrainerState
    buffers: Buffers
    begin_s: float
    retry: bool
    failure: BaseException | None = None
    retrying: bool = False
    abandoned: bool = False
    done: bool = False


class CheckpointWriter:
    """Snapshots live tensors and writes them on a thread of their own."""

    def __init__(
        self,
        directory: Path,
        *,
        identity: RunIdentity,
        drafter: Tensors,
        optimizer: Tensors,
        rule: CheckpointConfig,
        hooks: WriterHooks,
    ) -> None:
        """Allocate buffers for the live tensors `drafter` and `optimizer`."""
        self._directory = directory
        self._identity = identity
        self._rule = rule
        self._hooks = hooks
        self._live = {"drafter": dict(drafter), "optimizer": dict(optimizer)}
        self._buffers: Buffers | None = self._new_buffers()
        self._times = WriteTimes(rule)
        self._current: _Save | None = None
        self._left_behind: _Save | None = None
        self._durable_step: int | None = None
        self._changed = threading.Condition()

    @property
    def buffer_bytes(self) -> int:
        """Host memory of the snapshot."""
        return sum(tensor.numel() * tensor.element_size() for group in self._live.values() for tensor in group.values())

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
            if not self._make_way(state.step, wait=wait, deadline_s=None):
                if wait:
                    raise self._error(state.step, "an earlier write hangs")
                return False
            if wait and self._durable_step == state.step:
                return True
            save = self._begin(state, retry=not wait)
            if wait:
                self._await(save, deadline_s=None)
                if save.failure is not None:
                    raise self._error(state.step, save.failure) from save.failure
        return True

    def save_within(self, state: TrainerState, *, budget_s: float) -> bool:
        """Save if that is likely to be durable within `budget_s`, going by the writes so far; never take longer.

        Returns:
            Whether the state is durable; if not, the newest durable checkpoint stands, and an event says why.
        """
        deadline_s = time.monotonic() + budget_s
        with self._changed:
            busy = self._current
            in_flight_s = None if busy is None or busy.retrying else time.monotonic() - busy.begin_s
            if busy is not None and busy.state.step == state.step and not busy.retrying:
                self._await(busy, deadline_s=deadline_s)
            if self._durable_step == state.step:
                return True
            if not self._times.fits(budget_s, in_flight_s=in_flight_s):
                details = {"reason": "does not fit", "budget_s": budget_s, "usual_s": self._times.usual_s}
                self._hooks.on_event("save_skipped", state.step, details | {"durable_step": self._durable_step})
                return False
            if not self._make_way(state.step, wait=True, deadline_s=deadline_s):
                return False
            save = self._begin(state, retry=False)
            self._await(save, deadline_s=deadline_s)
            return save.failure is None

    def close(self) -> None:
        """Wait for a save in flight, unless it hangs; one that only waits to be tried again is given up."""
        with self._changed:
            if self._current is not None:
                if self._current.retrying:
                    self._give_up(self._current)
                self._await(self._current, deadline_s=None)

    def _make_way(self, step: int, *, wait: bool, deadline_s: float | None) -> bool:
        """End or await what is in flight; returns whether a new save may begin."""
        busy = self._current
        if busy is None:
            return True
        if busy.retrying:
            self._give_up(busy)
            self._changed.wait_for(lambda: busy.done)
            return True
        if time.monotonic() - busy.begin_s > self._times.limit_s:
            return self._leave_behind(busy, "hung")
        if not wait:
            self._hooks.on_event("save_skipped", step, {"in_flight_step": busy.state.step})
            return False
        self._await(busy, deadline_s=deadline_s)
        return self._current is None

    def _begin(self, state: TrainerState, *, retry: bool) -> _Save:
        begin_s = time.monotonic()
        self._hooks.on_event("save_begin", state.step, {})
        buffers = self._new_buffers() if self._buffers is None else self._buffers
        self._snapshot(buffers)
        blocked_s = time.monotonic() - begin_s
        self._hooks.on_event("save_staged", state.step, {"blocked_s": blocked_s, "bytes": self.buffer_bytes})
        self._buffers = None
        save = _Save(state=state, buffers=buffers, begin_s=begin_s, retry=retry)
        self._current = save
        threading.Thread(target=self._run, args=(save,), name=f"checkpoint-{state.step}", daemon=True).start()
        return save

    def _await(self, save: _Save, *, deadline_s: float | None) -> None:
        """Wait until a save ends, hangs, or the deadline has passed; in the last two cases it is left behind."""
        save.retry = False  # it may fail while it is waited for: whoever waits has no time for another attempt
        limit_s = save.begin_s + self._times.limit_s
        until_s = limit_s if deadline_s is None else min(limit_s, deadline_s)
        if self._changed.wait_for(lambda: save.done, timeout=max(0.0, until_s - time.monotonic())):
            return
        reason = "hung" if until_s == limit_s else "out of time"
        if self._leave_behind(save, reason):
            took_s = time.monotonic() - save.begin_s
            save.failure = CheckpointError(
                f"the write is not done after {took_s:.0f} s", remedy="look at the disk: it is slow or hangs"
            )

    def _leave_behind(self, save: _Save, reason: str) -> bool:
        """Report a write that does not end and go on without it; False if there is one left behind already."""
        details = {"error": f"the write is not done after {time.monotonic() - save.begin_s:.0f} s", "hung": reason == "hung"}
        self._hooks.on_event("save_failed", save.state.step, details)
        logger.error("checkpoint step-%d: %s (%s)", save.state.step, details["error"], reason)
        if self._left_behind is not None and not self._left_behind.done:
            return False
        self._left_behind, self._current = save, None
        save.abandoned = True
        return True

    def _give_up(self, save: _Save) -> None:
        save.abandoned = True
        self._changed.notify_all()

    def _error(self, step: int, failure: BaseException | str) -> CheckpointError:
        why = failure.what if isinstance(failure, DflashError) else str(failure)
        return CheckpointError(
            f"checkpoint step-{step} could not be written: {why}",
            remedy=f"make room or mend {self._directory}; a new start continues from the newest durable checkpoint",
        )

    def _new_buffers(self) -> Buffers:
        return {group: _buffers_like(tensors) for group, tensors in self._live.items()}

    def _snapshot(self, buffers: Buffers) -> None:
        self._hooks.before_snapshot()
        with torch.no_grad():
            for group, tensors in buffers.items():
                for name, buffer in tensors.items():
                    buffer.copy_(self._hooks.whole(self._live[group][name]), non_blocking=True)
        for device in {tensor.device for group in self._live.values() for tensor in group.values()}:
            if device.type == "cuda":
                # The copies' own stream: a target on the same device goes on.
                torch.cuda.current_stream(device).synchronize()

    def _run(self, save: _Save) -> None:
        while True:
            failure = self._try(save)
            with self._changed:
                save.failure = failure
                save.retrying = save.retry and isinstance(failure, (OSError, DflashError)) and not save.abandoned
                self._changed.notify_all()
                if save.retrying and not self._changed.wait_for(lambda: save.abandoned, timeout=self._rule.retry_s):
                    save.retrying, save.begin_s = False, time.monotonic()
                    continue
                self._finish(save)
                return

    def _finish(self, save: _Save) -> None:
        save.done, save.retrying = True, False
        if self._current is save:
            self._current = None
            self._buffers = save.buffers
            if save.failure is None:
                self._durable_step = save.state.step
        self._changed.notify_all()

    def _try(self, save: _Save) -> BaseException | None:
        try:
            self._write(save)
        except _AbandonedError as error:
            return error
        except (OSError, DflashError) as error:
            if not save.abandoned:
                logger.error("checkpoint step-%d failed: %s", save.state.step, error)
                details = {"error": str(error), "hung": False} | ({"retry_in_s": self._rule.retry_s} if save.retry else {})
                self._hooks.on_event("save_failed", save.state.step, details)
            return error
        except BaseException as error:  # noqa: BLE001 - handed to the replica, which stops and raises it
            self._hooks.on_defect(error)
            return error
        return None

    def _write(self, save: _Save) -> None:
        begin_s = time.monotonic()
        self._hooks.before_commit()

        def on_operation(name: str) -> None:
            if save.abandoned:
                what = f"the write of step-{save.state.step} was given up before {name!r}"
                raise _AbandonedError(what, remedy="nothing: the log says why, and a later save takes its place")
            self._hooks.on_operation(name)

        content = CheckpointContent(
            state=save.state, identity=self._identity, drafter=save.buffers["drafter"], optimizer=save.buffers["optimizer"]
        )
        manifest = save_checkpoint(self._directory, content, created_at=datetime.now(UTC).isoformat(), on_operation=on_operation)
        write_s = time.monotonic() - begin_s
        details = {"write_s": write_s, "bytes": sum(entry.size_bytes for entry in manifest.files), "finite": manifest.finite}
        with self._changed:
            self._times.note(write_s)
        self._hooks.on_event("save_durable", save.state.step, details)


def _buffers_like(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Contiguous host tensors of the same shapes, pinned where the live ones are on a GPU."""
    buffers = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
        for name, tensor in tensors.items()
    }
    for buffer in buffers.values():
        buffer.zero_()  # now, not in the first snapshot: fresh pages cost several times the copy
    return buffers
