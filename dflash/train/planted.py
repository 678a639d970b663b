"""Faults that a drill plants in a trainer on purpose: bad batches, damaged weights, a save that hangs, records cut short.

Invariant: nothing here acts unless the run's configuration says `drill.faults` AND its control folder holds a fault; a fault
in any other run is refused before the first step. Every effect is loud in the trainer's output and noted in `planted.jsonl`.
Hard decision: a fault acts where a real one would (the batch's features, the gradients, the weights, the writing thread, the
log) and never tells the health check or the supervisor anything: they have only what they would have had.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dflash.config import Config
from dflash.errors import RunStateError
from dflash.model.drafter import Drafter
from dflash.records import EventName, FaultPlan, PlantedFault, RunPaths, StepRecord, from_json
from dflash.train.features import FeatureBatch
from dflash.train.planted_log import append_planted, planted_lines
from dflash.train.step import Stepper, Update
from dflash.train.trainer import StepLog

logger = logging.getLogger(__name__)

EXPLOSION_FACTOR = -1e4
"""Of the gradient: uphill, and so large that the optimizer's second moments take hundreds of steps to forget it."""

RAMP_FIRST, RAMP_GROWTH = 0.008, 1.05
"""Noise of the ramp's first update, as a share of each weight tensor's root mean square, and its growth with every update."""

BAD_RESUME_NOISE = 1.5
"""Likewise of a bad resume."""

HANG_S = 45.0
SHORT_TOKENS = 4
SHORT_LOSS_FACTOR = 3.0
"""A window of this many tokens, and how far its loss is from the usual: by chance, not by damage."""

Operation = Callable[[str], None]


class Faults:
    """No fault: everything is handed through."""

    def restored(self, drafter: Drafter, *, step: int | None) -> None:
        """The weights of checkpoint `step` (None: the first weights) are in place."""

    def stepper(self, inner: Stepper, drafter: Drafter, *, step: int) -> Stepper:  # noqa: ARG002
        """What the loop trains with from state `step` on."""
        return inner

    def operation(self, inner: Operation) -> Operation:
        """What is called before each file operation of a save."""
        return inner

    def log(self, inner: StepLog) -> StepLog:
        """What the loop logs to."""
        return inner


def faults_of(config: Config, paths: RunPaths, *, segment: int) -> Faults:
    """The faults of a run's segment; those of a run that is no drill do nothing.

    Raises:
        RunStateError: a fault lies in a run that is no drill.
    """
    if not paths.planted_fault.is_file():
        return Faults()
    if not config.drill.faults:
        raise RunStateError(
            f"{paths.planted_fault} asks for a planted fault, and run {paths.root} is no drill (drill.faults is false)",
            remedy="remove that file; faults are planted by `make drill` alone",
        )
    plan = from_json(FaultPlan, paths.planted_fault.read_bytes(), origin=str(paths.planted_fault))
    logger.warning("DRILL: this run is to suffer the fault `%s` from step %d on", plan.name, plan.step)
    return PlantedFaults(plan, paths, segment=segment, interval_steps=config.checkpoint.interval_steps)


class PlantedFaults(Faults):
    """One fault in one segment.

    Attributes:
        plan: what it is.
        step: of the update in progress; the writing thread reads it.
    """

    def __init__(self, plan: FaultPlan, paths: RunPaths, *, segment: int, interval_steps: int) -> None:
        self.plan = plan
        self.step = 0
        self._paths = paths
        self._segment = segment
        self._interval_steps = interval_steps
        # What happens once has happened in an earlier segment: the machine was mended since.
        self._over = any(line.segment < segment for line in planted_lines(paths))

    def restored(self, drafter: Drafter, *, step: int | None) -> None:
        """Damage the weights of the first resume at or behind the fault's step."""
        if self.plan.name == "bad-resume" and step is not None and not self._over:
            add_noise(drafter, share=BAD_RESUME_NOISE, seed=self.plan.seed)
            self.note(step, None, "the restored weights are damaged")

    def stepper(self, inner: Stepper, drafter: Drafter, *, step: int) -> Stepper:
        """A stepper whose bad batches are bad, and whose weights rot while the ramp lasts."""
        self.step = step
        return _FaultyStepper(inner, drafter, self)

    def operation(self, inner: Operation) -> Operation:
        """A disk that hangs once, in the first save at or behind the fault's step."""
        due = self.plan.name == "hung-save" and not self._over

        def on_operation(name: str) -> None:
            nonlocal due
            if due and name == "optimizer" and self.step >= self.plan.step:
                due = False
                self.note(self.step, None, f"a save hangs for {HANG_S:.0f} s")
                time.sleep(HANG_S)  # the writing thread of the save, as a disk that does not answer would hold it
            inner(name)

        return on_operation

    def log(self, inner: StepLog) -> StepLog:
        """A log whose records after saves are cut short, if that is the fault."""
        return _ShortWindowLog(inner, self) if self.plan.name == "save-artefact" else inner

    def is_bad(self, position: int) -> bool:
        """Whether the batch at a plan position is bad; it is whenever it is trained on."""
        return self.plan.first_position <= position < self.plan.end_position

    def is_short(self, step: int) -> bool:
        """Whether the record of this step looks like one of a window that a save cut short."""
        return step >= self.plan.step and step % self._interval_steps == 0

    def rot(self, drafter: Drafter) -> None:
        """Damage the weights after an update, ever more, for as long as the ramp lasts."""
        age = self.step - self.plan.step
        if self.plan.name == "ramp" and age >= 0 and not self._over:
            add_noise(drafter, share=RAMP_FIRST * RAMP_GROWTH**age, seed=self.plan.seed + age)
            if age == 0:
                self.note(self.step, None, "noise is added to the weights, ever more")

    def note(self, step: int, position: int | None, what: str) -> None:
        """Say loudly that the fault has taken effect."""
        logger.warning("DRILL: fault `%s` planted at step %d of segment %d: %s", self.plan.name, step, self._segment, what)
        line = PlantedFault(name=self.plan.name, segment=self._segment, step=step, position=position, at_s=time.time())
        append_planted(self._paths, line)


@torch.no_grad()
def add_noise(drafter: Drafter, *, share: float, seed: int) -> None:
    """Add to each weight tensor noise of `share` of its root mean square, the same on every rank."""
    for number, parameter in enumerate(drafter.parameters()):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        parameter.add_(noise * (share * parameter.square().mean().sqrt()))


class _FaultyStepper(Stepper):
    """Delegates to the real stepper, and damages what goes in or what comes out."""

    def __init__(self, inner: Stepper, drafter: Drafter, faults: PlantedFaults) -> None:
        # The inner one owns gradients and optimizer: nothing of the base class's own state is needed.
        self._inner = inner
        self._model = drafter
        self._faults = faults

    def accumulate(self, batch: FeatureBatch) -> None:
        """Forward and backward of a micro-batch, bad or not."""
        position = batch.planned.position
        if not self._faults.is_bad(position):
            self._inner.accumulate(batch)
        elif self._faults.plan.name == "nan":
            self._faults.note(self._faults.step, position, f"the features of batch {position} are NaN")
            self._inner.accumulate(dataclasses.replace(batch, features=batch.features * math.nan))
        else:
            self._faults.note(self._faults.step, position, f"the gradient of batch {position} explodes")
            self._inner.accumulate(batch)
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(EXPLOSION_FACTOR)

    def update(self, *, lr: float, norm_limit: float) -> Update:
        """The real update, then what the fault makes of the weights."""
        update = self._inner.update(lr=lr, norm_limit=norm_limit)
        self._faults.rot(self._model)
        self._faults.step += 1
        return update

    def join_others(self, passes: int) -> None:
        """Take part in other ranks' passes."""
        self._inner.join_others(passes)

    def weight_sum(self) -> float:
        """Sum of all weights."""
        return self._inner.weight_sum()


class _ShortWindowLog:
    """Delegates to the real log; after each save one record tells of a handful of tokens only, and of a high loss."""

    def __init__(self, inner: StepLog, faults: PlantedFaults) -> None:
        self._inner, self._faults = inner, faults

    def step(self, record: StepRecord) -> None:
        """Append a record, cut short if it is the first one after a save."""
        if self._faults.is_short(record.step) and record.ce is not None:
            self._faults.note(record.step, None, "the record after this save tells of a few tokens only")
            record = short_window(record)
        self._inner.step(record)

    def event(self, name: EventName, step: int, details: Mapping[str, Any]) -> None:
        """Append an event."""
        self._inner.event(name, step, details)


def short_window(record: StepRecord) -> StepRecord:
    """The record as a metric window of one sequence and a few tokens would show it: a high loss and no hit."""
    if record.ce is None:
        return record
    loss = SHORT_LOSS_FACTOR * record.ce
    batch = record.micro_batches[0]
    slots = tuple(int(slot < SHORT_TOKENS) for slot in range(len(batch.valid)))
    tokens = sum(slots)
    cut = dataclasses.replace(
        batch, rows=batch.rows[:1], n_seqs=1, n_blocks=1, n_tokens=tokens, ce_sum=loss * tokens, objective_sum=loss * tokens,
        objective_weight=float(tokens), accepted_sum=1.0, correct=(0,) * len(slots), valid=slots,
    )  # fmt: skip
    return dataclasses.replace(record, ce=loss, objective=loss, accuracy=0.0, accepted_length=1.0, micro_batches=(cut,))
