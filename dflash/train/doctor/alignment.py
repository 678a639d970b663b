"""Label alignment: what every slot must predict, recomputed by hand, and one batch of the run's data learnt by heart.

Dimensions: B batch, S tokens, N blocks, K block size.
Invariants: labels, flags and block inputs are compared with a plain loop over the batch, so a label off by one is found even
though a drafter could learn it; and the overfit goes through the production path (features, loss, optimizer step).
Hard decision: the learning rate is 1 / width. A batch of a few dozen blocks is learnt by heart at that rate at every width
tried, and the run's own rate is laid out for another number of steps.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import torch

from dflash.config import Config
from dflash.data.reader import Batch, collate
from dflash.model.drafter import Drafter
from dflash.model.head import FrozenHead
from dflash.model.parameters import drafter_parameter_count
from dflash.model.target import Target
from dflash.records import CheckResult
from dflash.train.features import FeatureBatch, FeatureMaker, make_maker
from dflash.train.group import Alone
from dflash.train.inputs import Inputs
from dflash.train.optimizer import build_optimizer
from dflash.train.step import Stepper, Update

_PAD_ID = 0  # as in training: padding stands behind causal sequences, so any id of the vocabulary will do
MAX_SEQUENCES = 4
MAX_BLOCKS = 24
MAX_UPDATES = 60
LEAST_UPDATES = 8
"""Fewer say nothing about learning."""
ENOUGH_FALL = 0.5
"""Share of the first cross-entropy at which the overfit has proven its point."""
NO_FALL = 0.95
MAX_CPU_PARAMETERS = 200_000_000


@dataclass(frozen=True, slots=True)
class Overfit:
    """How learning one batch by heart went: (first, last) of each figure.

    Attributes:
        ce: plain cross-entropy; accuracy: of slot 1; accepted: drafts accepted a block.
    """

    ce: tuple[float, float]
    accuracy: tuple[float, float]
    accepted: tuple[float, float]
    updates: int
    seconds: float


def alignment_checks(maker: FeatureMaker, batch: Batch, *, time_limit_s: float) -> tuple[CheckResult, ...]:
    """Both checks on a few sequences of a batch.

    Args:
        maker: what a target worker would use, see `feature_maker`.
        batch: of the run's own data.
        time_limit_s: the overfit stops after this long.
    """
    small = first_rows(batch, MAX_SEQUENCES)
    features = maker.make(small)
    labels = judge_labels(small, features)
    if labels.status == "fail":
        return (labels,)
    parameters = drafter_parameter_count(maker.config.drafter, maker.target.info.hidden_size)
    if maker.drafter_device.type == "cpu" and parameters > MAX_CPU_PARAMETERS:
        message = f"{parameters / 1e9:.2f} B parameters are too many to overfit on a CPU"
        return labels, CheckResult("overfit", "skip", message, "run the doctor on a machine with a GPU")
    return labels, judge_overfit(overfit(maker, features, time_limit_s=time_limit_s))


def first_batch(inputs: Inputs) -> Batch:
    """The first batch of the run's plan."""
    return collate(inputs.plan[0], inputs.store, pad_id=_PAD_ID)


def first_rows(batch: Batch, rows: int) -> Batch:
    """The same batch with its first rows only."""
    return Batch(batch.planned, batch.input_ids[:rows], batch.loss_mask[:rows], batch.lengths[:rows])


def feature_maker(config: Config, target: Target, *, mask_token_id: int, drafter_device: torch.device) -> FeatureMaker:
    """A target worker's own feature maker, with few anchors and in float32."""
    anchors = config.train.anchors.model_copy(update={"max_per_batch": min(MAX_BLOCKS, config.train.anchors.max_per_batch)})
    few = config.model_copy(update={"train": config.train.model_copy(update={"anchors": anchors})})
    return make_maker(
        target=target,
        target_index=0,
        config=few,
        mask_token_id=mask_token_id,
        drafter_device=drafter_device,
        dtype=torch.float32,
    )


def judge_labels(batch: Batch, features: FeatureBatch) -> CheckResult:
    """Recompute every label: slot k of the block at a is token a+k, up to the first token without loss."""
    positions, keep = features.anchors.positions.cpu().numpy(), features.anchors.keep.cpu().numpy()
    labels, valid = features.labels.labels.cpu().numpy(), features.labels.valid.cpu().numpy()
    block_size = labels.shape[-1]
    wrong, checked = [], 0
    for row, column in np.argwhere(keep):
        anchor, end = int(positions[row, column]), int(batch.lengths[row])
        going = bool(batch.loss_mask[row, anchor])
        if not going:
            wrong.append(f"anchor {anchor} of sequence {row} carries no loss")
        for slot in range(1, block_size):
            place = anchor + slot
            going = going and place < end and bool(batch.loss_mask[row, place])
            found, flagged = int(labels[row, column, slot]), bool(valid[row, column, slot])
            checked += going
            if flagged != going:
                wrong.append(f"slot {slot} at anchor {anchor} is {'' if flagged else 'not '}supervised")
            elif going and found != int(batch.input_ids[row, place]):
                wrong.append(f"slot {slot} at anchor {anchor} predicts {found}, the text has {int(batch.input_ids[row, place])}")
    if wrong:
        message = f"{len(wrong)} slots are wrong: {wrong[0]}"
        return CheckResult("labels", "fail", message, "labels must be the token at the slot's own position; report this")
    if not checked:
        return CheckResult("labels", "warn", "the batch trains no slot", "look at the loss masks: python -m dflash data show")
    return CheckResult("labels", "ok", f"{checked} labels of {int(keep.sum())} blocks are the tokens at their own positions", "")


def overfit(maker: FeatureMaker, features: FeatureBatch, *, time_limit_s: float) -> Overfit:
    """Learn one batch by heart with a fresh drafter, until the loss has halved, or the time or the updates are used up."""
    begin_s = time.monotonic()
    config, target = maker.config, maker.target
    drafter = Drafter(config.drafter, target_hidden_size=target.info.hidden_size)
    drafter.init_weights(config.run.seed)
    drafter = drafter.to(maker.drafter_device).train()
    rate = 1.0 / config.drafter.hidden_size
    optimizer = build_optimizer(drafter, config.train.optimizer, lr=rate)
    stepper = Stepper(
        drafter,
        optimizer,
        head=FrozenHead(target.head_weight.detach().to(maker.drafter_device), target.logit_rule),
        loss=config.train.loss,
        clip_norm=config.train.clip_norm,
        autocast_dtype=None,
        group=Alone(),
    )
    history: list[Update] = []
    while len(history) < MAX_UPDATES:
        stepper.accumulate(features)
        history.append(stepper.update(lr=rate, norm_limit=math.inf))
        if history[-1].nonfinite or time.monotonic() - begin_s > time_limit_s:
            break
        if len(history) >= LEAST_UPDATES and history[-1].ce <= ENOUGH_FALL * history[0].ce:
            break
    first, last = history[0], history[-1]
    return Overfit(
        ce=(first.ce, last.ce),
        accuracy=(_slot_accuracy(first), _slot_accuracy(last)),
        accepted=(_accepted(first), _accepted(last)),
        updates=len(history),
        seconds=time.monotonic() - begin_s,
    )


def judge_overfit(result: Overfit) -> CheckResult:
    """The loss must have fallen clearly and the drafts become better; a short try says nothing."""
    (before, after), name = result.ce, "overfit"
    text = (
        f"CE {before:.2f} -> {after:.2f}, slot 1 {result.accuracy[0]:.2f} -> {result.accuracy[1]:.2f}, "
        f"accepted {result.accepted[0]:.2f} -> {result.accepted[1]:.2f} in {result.updates} updates, {result.seconds:.1f} s"
    )
    if not after < float("inf"):
        return CheckResult(name, "fail", text, "the loss is not finite: check the target's dtype and the drafter's shape")
    if result.updates < LEAST_UPDATES:
        return CheckResult(name, "warn", f"too slow to judge: {text}", "nothing, or give the doctor more time")
    if after > NO_FALL * before:
        return CheckResult(name, "fail", f"one batch cannot be learnt: {text}", "labels, features or gradients do not fit together")
    better = result.accepted[1] > result.accepted[0] or result.accuracy[1] > result.accuracy[0]
    if after > ENOUGH_FALL * before or not better:
        return CheckResult(name, "warn", f"learnt slowly: {text}", "raise drafter.initializer_range, or give the doctor more time")
    return CheckResult(name, "ok", text, "")


def _slot_accuracy(update: Update) -> float:
    return sum(item.correct[0] for item in update.sums) / max(1, sum(item.valid[0] for item in update.sums))


def _accepted(update: Update) -> float:
    return sum(item.accepted_sum for item in update.sums) / max(1, sum(item.n_blocks for item in update.sums))
