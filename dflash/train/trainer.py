"""The drafter loop: consumes features in plan order, steps, logs, saves; the same loop on every rank.

Invariants: the loop never waits for the disk except for the first, the last and a requested save; progress is two
integers (optimizer step and plan position), so stopping between any two steps and starting again changes nothing.
A step consumes neighbours of the plan whatever the number of ranks, and every rank takes part in every step: so all ranks
count alike, and each decides from the same gathered words. Only rank 0 logs and saves.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dflash.config import Config
from dflash.data.plan_arrays import BatchPlan
from dflash.data.reader import Batch
from dflash.errors import InterruptedRunError, NonFiniteLimitError
from dflash.records import EventName, StepRecord, TrainerState
from dflash.rollback import lr_factor
from dflash.train.balance import ReplicaTimes, StageTime, advice, stage_shares
from dflash.train.features import FeatureBatch
from dflash.train.group import Group
from dflash.train.guard import kind_of, norm_limit, remember
from dflash.train.metrics import BatchFacts, RankReport, StepContext, step_record
from dflash.train.processes import STOP_GRACE_S
from dflash.train.replica import FeatureSupply
from dflash.train.schedule import deal_step, decay_start, lr_at, split_steps, warmup_factor, warmup_steps
from dflash.train.step import Stepper, Update

logger = logging.getLogger(__name__)

_STOP_MARGIN_S = 3.0
"""For everything between a signal and the kill that is neither the last step nor the save."""


class StepLog(Protocol):
    """Where the loop's records go."""

    def step(self, record: StepRecord) -> None:
        """Append a step record without waiting."""

    def event(self, name: EventName, step: int, details: Mapping[str, Any]) -> None:
        """Append an event without waiting."""


class Saver(Protocol):
    """Where the loop's checkpoints go."""

    def save(self, state: TrainerState, *, wait: bool) -> bool:
        """Snapshot the live tensors and have them written."""

    def save_within(self, state: TrainerState, *, budget_s: float) -> bool:
        """Save if that can be done in time; returns whether the state is durable."""


class Silent:
    """Log and checkpoints of a rank that keeps none."""

    def step(self, record: StepRecord) -> None:
        """Rank 0 logs it."""

    def event(self, name: EventName, step: int, details: Mapping[str, Any]) -> None:
        """Rank 0 logs it."""

    def save(self, state: TrainerState, *, wait: bool) -> bool:  # noqa: ARG002
        """Rank 0 saves it."""
        return True

    def save_within(self, state: TrainerState, *, budget_s: float) -> bool:  # noqa: ARG002
        """Rank 0 saves it."""
        return True


@dataclass(frozen=True, slots=True)
class Machinery:
    """What the loop drives.

    Attributes:
        plan: the whole plan.
        group: all ranks.
        stop: set by a signal; every rank ends after the step in which any of them was asked to.

    """

    plan: BatchPlan
    group: Group
    supply: FeatureSupply[Batch, FeatureBatch]
    stepper: Stepper
    log: StepLog
    checkpoints: Saver
    stop: threading.Event


class Trainer:
    """Runs the optimizer steps of one segment."""

    def __init__(self, config: Config, *, state: TrainerState, machinery: Machinery) -> None:
        self._config = config
        self._train = config.train
        self._state = state
        self._machinery = machinery
        self._log = machinery.log
        self._stop = False
        self._last_step_s = 0.0
        self._busy_s = 0.0
        self._waited_s = 0.0
        self._batches = 0

    def run(self, positions: Sequence[int]) -> TrainerState:
        """Train on the plan positions left (of all ranks), in order.

        Returns:
            The final state, whose checkpoint is durable.

        Raises:
            InterruptedRunError: a stop was requested; the state was saved first.
            NonFiniteLimitError: too many updates in a row were not finite.
            CheckpointError: the last checkpoint could not be written.
            BrokenGroupError: another rank died or stalled.
            BaseException: the error of a stage that failed.
        """
        begin_s = time.monotonic()
        if self._state.step == 0:
            # The untrained drafter is clean by definition: every run has something to fall back to and compare with.
            self._machinery.checkpoints.save(self._state, wait=True)
        self._stop = any(self._machinery.group.gather(self._machinery.stop.is_set()))
        for group in step_groups(self._config, self._state, positions):
            if self._stop:
                self._stop_early()
            self._step(group)
            if self._state.step % self._config.checkpoint.interval_steps == 0 and self._state.step < self._state.total_steps:
                self._require_equal_weights()
                self._machinery.checkpoints.save(self._state, wait=False)
        if self._state.step < self._state.total_steps:
            # Skipped batches leave fewer steps than the schedule was laid out for: the plan is used up all the same.
            self._state = dataclasses.replace(self._state, plan_position=len(self._machinery.plan))
        self._require_equal_weights()
        # Before the save: the other ranks are done then, and need not wait for the disk.
        account = self._account(wall_s=time.monotonic() - begin_s)
        self._machinery.checkpoints.save(self._state, wait=True)
        self._log.event("finish", self._state.step, account)
        return self._state

    def _step(self, positions: Sequence[int]) -> None:
        step, machinery = self._state.step, self._machinery
        wall_time_s, begin_s = time.time(), time.monotonic()
        self._note_planned_changes(positions)
        depths = machinery.supply.depths
        lr = lr_at(self._train, step=step, total_steps=self._state.total_steps, lr_scale=lr_factor(self._state.overlay, step=step))
        batches, waited_s = self._consume(positions)
        kind = kind_of({machinery.plan.bucket_of(position) for position in positions})
        limit = norm_limit(self._state.guard, kind, over=self._train.skip_update_if_grad_over)
        update = machinery.stepper.update(lr=lr, norm_limit=limit)
        step_time_s = time.monotonic() - begin_s
        report = RankReport(
            batches=tuple(BatchFacts.of(batch) for batch in batches),
            wait_time_s=waited_s,
            depths=depths,
            finished=machinery.supply.finished,
            stop=machinery.stop.is_set(),
        )
        reports = self._reports_of_all(report)
        self._stop = any(report.stop for report in reports)
        context = StepContext(
            segment=self._state.segment,
            step=step,
            wall_time_s=wall_time_s,
            mono_time_s=begin_s,
            lr=lr,
            warmup_factor=warmup_factor(self._train, step=step, total_steps=self._state.total_steps),
            plan_position=positions[-1] + 1,
            step_time_s=step_time_s,
        )
        self._log.step(step_record(context, update, reports))
        self._last_step_s = step_time_s
        self._busy_s += step_time_s - waited_s
        self._waited_s += waited_s
        self._batches += len(batches)
        if update.over_limit:
            self._note_over_limit(positions, update, kind=kind, limit=limit)
        self._advance(positions, update, kind=kind)

    def _consume(self, positions: Sequence[int]) -> tuple[list[FeatureBatch], float]:
        """Forward and backward of this rank's share of a step; returns it, and the seconds spent waiting for it."""
        machinery = self._machinery
        batches, waited_s = [], 0.0
        for position in own_positions(machinery.plan, positions, group=machinery.group):
            batch, wait_s = machinery.supply.next()
            if batch.planned.position != position:
                raise RuntimeError(f"batch {batch.planned.position} arrived where the plan has {position}")
            waited_s += wait_s
            machinery.stepper.accumulate(batch)
            batches.append(batch)
        if self._config.cluster.shard:
            machinery.stepper.join_others(-(-len(positions) // machinery.group.size) - len(batches))
        return batches, waited_s

    def _reports_of_all(self, report: RankReport) -> list[RankReport]:
        if self._machinery.group.size == 1:
            return [report]
        return [RankReport.from_word(word) for word in self._machinery.group.gather(dataclasses.asdict(report))]

    def _advance(self, positions: Sequence[int], update: Update, *, kind: str) -> None:
        step, in_row = self._state.step, self._state.nonfinite_in_row + 1 if update.nonfinite else 0
        guard = self._state.guard
        if not update.nonfinite:
            guard = remember(guard, kind, norm=update.grad_norm, accepted=not update.over_limit)
        self._state = dataclasses.replace(
            self._state, step=step + 1, plan_position=positions[-1] + 1, nonfinite_in_row=in_row, guard=guard
        )
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

    def _note_over_limit(self, positions: Sequence[int], update: Update, *, kind: str, limit: float) -> None:
        step = self._state.step
        details = {
            "batch_ids": list(positions),
            "nonfinite": [],
            "grad_norm": update.grad_norm,
            "limit": limit,
            "kind": kind,
            "grad_over": self._train.skip_update_if_grad_over,
        }
        self._log.event("skip", step, details)
        logger.warning(
            "update %d skipped: gradient norm %.3g is over %.3g (batches %s)", step, update.grad_norm, limit, list(positions)
        )

    def _require_equal_weights(self) -> None:
        """Refuse to save weights that are not the same on all ranks; a restart from the last checkpoint makes them equal again."""
        if self._machinery.group.size == 1:
            return
        sums = self._machinery.group.gather(self._machinery.stepper.weight_sum())
        if len(set(sums)) > 1:
            raise RuntimeError(f"the ranks' weights have drifted apart by step {self._state.step}: their sums are {sums}")

    def _account(self, *, wall_s: float) -> dict[str, Any]:
        """What the stages of all ranks did with their time, and which split would be better."""
        reader, targets = self._machinery.supply.stage_times
        drafter = StageTime(workers=1, busy_s=self._busy_s, starved_s=self._waited_s, blocked_s=0.0)
        own = ReplicaTimes(wall_s=wall_s, batches=self._batches, reader=reader, targets=targets, drafter=drafter)
        words = self._machinery.group.gather(dataclasses.asdict(own))
        every = [_times_of(word) for word in words]
        text = advice(every, devices=self._config.cluster.devices_needed)
        shares = stage_shares(every)
        busy = ", ".join(
            f"{stage} {share['busy_frac']:.0%} (starved {share['starved_frac']:.0%})" for stage, share in shares.items()
        )
        logger.info("busy: %s; %s", busy, text)
        return {"queues": self._machinery.supply.counters, "stages": shares, "replica_times": words, "advice": text}

    def _note_planned_changes(self, positions: Sequence[int]) -> None:
        step, plan = self._state.step, self._machinery.plan
        for position in positions:
            epoch = plan.epoch_of(position)
            if position == 0 or plan.epoch_of(position - 1) != epoch:
                self._log.event("epoch", step, {"epoch": epoch, "batch_id": position})
        warmup = warmup_steps(self._train, total_steps=self._state.total_steps)
        if step == warmup and warmup > 0:
            self._log.event("lr_change", step, {"from": "warmup", "to": self._train.schedule, "lr": self._train.lr})
        if step > 0 and step == decay_start(self._train, total_steps=self._state.total_steps):
            self._log.event("lr_change", step, {"from": "stable", "to": "decay", "lr": self._train.lr})

    def _stop_early(self) -> None:
        step = self._state.step
        self._log.event("stop_requested", step, {})
        # The signal came during the last step at the earliest.
        budget_s = STOP_GRACE_S - _STOP_MARGIN_S - self._last_step_s
        saved = self._machinery.checkpoints.save_within(self._state, budget_s=budget_s)
        kept = "its state is saved" if saved else "saving did not fit the time, so its newest durable checkpoint stands"
        raise InterruptedRunError(
            f"training was asked to stop after step {step} of {self._state.total_steps}; {kept}",
            remedy="start it again to continue from there",
        )


def step_groups(config: Config, state: TrainerState, positions: Sequence[int]) -> Iterator[Sequence[int]]:
    """The plan positions of each step that is left, of all ranks together."""
    return split_steps(positions, step_batches=config.micro_batches_per_step, steps=state.total_steps - state.step)


def own_positions(plan: BatchPlan, positions: Sequence[int], *, group: Group) -> Sequence[int]:
    """The own rank's share of a step's positions, in plan order."""
    if group.size == 1:
        return positions
    return [positions[index] for index in deal_step(costs_of(plan, positions), ranks=group.size)[group.rank]]


def costs_of(plan: BatchPlan, positions: Sequence[int]) -> list[int]:
    """Padded tokens of the batches at some positions."""
    return [plan.padded_tokens_of(position) for position in positions]


def _times_of(word: Mapping[str, Any]) -> ReplicaTimes:
    stages = {name: StageTime(**word[name]) for name in ("reader", "targets", "drafter")}
    return ReplicaTimes(wall_s=word["wall_s"], batches=word["batches"], **stages)
