"""The drafter loop: consumes features in plan order, steps, logs, saves.

Invariant: the loop never waits for the disk except for the first, the last and a requested save; progress is two
integers (optimizer step and plan position), so stopping between any two steps and starting again changes nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dflash.checkpoint import CheckpointWriter
from dflash.config import TrainConfig
from dflash.data.plan_arrays import BatchPlan
from dflash.data.reader import Batch
from dflash.errors import InterruptedRunError, NonFiniteLimitError
from dflash.records import TrainerState
from dflash.rollback import lr_factor
from dflash.train.features import FeatureBatch
from dflash.train.metrics import StepContext, step_record
from dflash.train.replica import FeatureSupply
from dflash.train.run_log import RunLog
from dflash.train.schedule import lr_at, split_steps, warmup_factor, warmup_steps
from dflash.train.step import Stepper, Update

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Machinery:
    """What the loop drives.

    Attributes:
        plan: the whole plan.
        stop: set by a signal; the loop ends after the step in progress.

    """

    plan: BatchPlan
    supply: FeatureSupply[Batch, FeatureBatch]
    stepper: Stepper
    log: RunLog
    checkpoints: CheckpointWriter
    stop: threading.Event


class Trainer:
    """Runs the optimizer steps of one segment."""

    def __init__(self, train: TrainConfig, *, save_interval_steps: int, state: TrainerState, machinery: Machinery) -> None:
        self._train = train
        self._save_interval_steps = save_interval_steps
        self._state = state
        self._machinery = machinery
        self._log = machinery.log

    def run(self, positions: Sequence[int]) -> TrainerState:
        """Train on the plan positions left, in order.

        Returns:
            The final state, whose checkpoint is durable.

        Raises:
            InterruptedRunError: a stop was requested; the state was saved first.
            NonFiniteLimitError: too many updates in a row were not finite.
            CheckpointError: the last checkpoint could not be written.
            BaseException: the error of a stage that failed.
        """
        steps_left = self._state.total_steps - self._state.step
        groups = split_steps(positions, accumulation_steps=self._train.accumulation_steps, steps=steps_left)
        if self._state.step == 0:
            # The untrained drafter is clean by definition: every run has something to fall back to and compare with.
            self._machinery.checkpoints.save(self._state, wait=True)
        for group in groups:
            if self._machinery.stop.is_set():
                self._stop_early()
            self._step(group)
            if self._state.step % self._save_interval_steps == 0 and self._state.step < self._state.total_steps:
                self._machinery.checkpoints.save(self._state, wait=False)
        if self._state.step < self._state.total_steps:
            # Skipped batches leave fewer steps than the schedule was laid out for: the plan is used up all the same.
            self._state = dataclasses.replace(self._state, plan_position=len(self._machinery.plan))
        self._machinery.checkpoints.save(self._state, wait=True)
        self._log.event("finish", self._state.step, {"queues": self._machinery.supply.counters})
        return self._state

    def _step(self, positions: Sequence[int]) -> None:
        step, machinery = self._state.step, self._machinery
        wall_time_s, begin_s = time.time(), time.monotonic()
        self._note_planned_changes(positions)
        depths = machinery.supply.depths
        lr = lr_at(self._train, step=step, total_steps=self._state.total_steps, lr_scale=lr_factor(self._state.overlay, step=step))
        batches, wait_time_s = [], 0.0
        for position in positions:
            batch, waited_s = machinery.supply.next()
            if batch.planned.position != position:
                raise RuntimeError(f"batch {batch.planned.position} arrived where the plan has {position}")
            wait_time_s += waited_s
            machinery.stepper.accumulate(batch)
            batches.append(batch)
        update = machinery.stepper.update(lr=lr)
        context = StepContext(
            segment=self._state.segment,
            step=step,
            wall_time_s=wall_time_s,
            mono_time_s=begin_s,
            lr=lr,
            warmup_factor=warmup_factor(self._train, step=step, total_steps=self._state.total_steps),
            plan_position=positions[-1] + 1,
            step_time_s=time.monotonic() - begin_s,
            wait_time_s=wait_time_s,
            depths=depths,
            finished=machinery.supply.finished,
        )
        self._log.step(step_record(context, update, batches))
        self._advance(positions, update)

    def _advance(self, positions: Sequence[int], update: Update) -> None:
        step, in_row = self._state.step, self._state.nonfinite_in_row + 1 if update.nonfinite else 0
        self._state = dataclasses.replace(self._state, step=step + 1, plan_position=positions[-1] + 1, nonfinite_in_row=in_row)
        if not update.nonfinite:
            return
        details = {"batch_ids": list(positions), "nonfinite": list(update.nonfinite), "in_row": in_row}
        self._log.event("skip", step, details)
        logger.warning("update %d skipped: %s not finite (batches %s)", step, ", ".join(update.nonfinite), list(positions))
        if in_row >= self._train.max_nonfinite_in_row:
            raise NonFiniteLimitError(
                f"{in_row} updates in a row were not finite, the last at step {step} on batches {list(positions)}",
                remedy="look at the `skip` events of train_log.jsonl; lower train.lr or remove the samples they name",
            )

    def _note_planned_changes(self, positions: Sequence[int]) -> None:
        step, plan = self._state.step, self._machinery.plan
        for position in positions:
            epoch = plan.epoch_of(position)
            if position == 0 or plan.epoch_of(position - 1) != epoch:
                self._log.event("epoch", step, {"epoch": epoch, "batch_id": position})
        warmup = warmup_steps(self._train, total_steps=self._state.total_steps)
        if step == warmup and warmup > 0:
            self._log.event("lr_change", step, {"from": "warmup", "to": self._train.schedule, "lr": self._train.lr})

    def _stop_early(self) -> None:
        step = self._state.step
        self._log.event("stop_requested", step, {})
        self._machinery.checkpoints.save(self._state, wait=True)
        raise InterruptedRunError(
            f"training was asked to stop after step {step} of {self._state.total_steps}; its state is saved",
            remedy="start it again to continue from there",
        )
