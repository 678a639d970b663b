"""The optimizer step: accumulate unnormalised gradients, divide once, clip, vote, update.

Dimensions: K block size.
Invariant: an update is applied only if the objective, its weight and the gradient norm are finite; a skipped one
changes neither weights nor moments. Numerators are back-propagated unnormalised and divided once by the summed
denominators, so any split into micro-batches (and replicas) gives the same gradient up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash.config import LossConfig
from dflash.model.drafter import Drafter
from dflash.model.head import FrozenHead
from dflash.model.loss import LossSums, block_loss
from dflash.train.features import FeatureBatch


@dataclass(frozen=True, slots=True)
class Sums:
    """`LossSums` of one micro-batch as numbers (NaN and infinities kept)."""

    objective_sum: float
    objective_weight: float
    ce_sum: float
    accepted_sum: float
    correct: tuple[int, ...]
    valid: tuple[int, ...]
    n_blocks: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Update:
    """What an optimizer step did.

    Attributes:
        sums: one entry a micro-batch.
        grad_norm: before clipping, of the normalised gradient (NaN or infinite when it was).
        clip_coef: factor applied; NaN when skipped.
        nonfinite: names of the quantities that forbade the update; empty if it was applied.

    """

    sums: tuple[Sums, ...]
    grad_norm: float
    clip_coef: float
    nonfinite: tuple[str, ...]

    @property
    def objective(self) -> float:
        """Mean objective of the step."""
        return _ratio(sum(item.objective_sum for item in self.sums), sum(item.objective_weight for item in self.sums))

    @property
    def ce(self) -> float:
        """Mean plain cross-entropy of the step."""
        return _ratio(sum(item.ce_sum for item in self.sums), sum(item.n_tokens for item in self.sums))


class Stepper:
    """Owns the drafter's gradients between two updates."""

    def __init__(
        self,
        drafter: Drafter,
        optimizer: torch.optim.AdamW,
        *,
        head: FrozenHead,
        loss: LossConfig,
        clip_norm: float,
        autocast_dtype: torch.dtype | None,
    ) -> None:
        self._drafter = drafter
        self._optimizer = optimizer
        self._head = head
        self._loss = loss
        self._clip_norm = clip_norm
        self._autocast_dtype = autocast_dtype
        self._parameters = list(drafter.parameters())
        self._pending: list[LossSums] = []

    def accumulate(self, batch: FeatureBatch) -> None:
        """Forward and backward of one micro-batch."""
        device_type = batch.features.device.type
        with torch.autocast(device_type, dtype=self._autocast_dtype, enabled=self._autocast_dtype is not None):
            hidden = self._drafter(batch.features, batch.block_embeds, batch.anchors.positions, batch.anchors.keep)
        sums = block_loss(hidden, batch.labels, batch.anchors.keep, self._head, loss=self._loss, target=batch.target_states)
        sums.objective_sum.backward()  # type: ignore[no-untyped-call]
        self._pending.append(sums)

    def update(self, *, lr: float) -> Update:
        """Apply (or skip) the update of everything accumulated, and forget the gradients."""
        sums = tuple(_numbers(item) for item in self._pending)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        weight = sum(item.objective_weight for item in sums)
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        grad_norm = _ratio(norm, weight)
        nonfinite = _vote(sums, grad_norm)
        clip_coef = math.nan
        if not nonfinite:
            clip_coef = 1.0 if grad_norm <= self._clip_norm else self._clip_norm / grad_norm
            for gradient in gradients:
                gradient.mul_(clip_coef / weight)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._pending.clear()
        return Update(sums=sums, grad_norm=grad_norm, clip_coef=clip_coef, nonfinite=nonfinite)


def _vote(sums: Sequence[Sums], grad_norm: float) -> tuple[str, ...]:
    quantities = {
        "ce": sum(item.ce_sum for item in sums),
        "objective": sum(item.objective_sum for item in sums),
        "objective_weight": sum(item.objective_weight for item in sums),
        "grad_norm": grad_norm,
    }
    names = [name for name, value in quantities.items() if not math.isfinite(value)]
    return tuple(names)


def _numbers(sums: LossSums) -> Sums:
    return Sums(
        objective_sum=float(sums.objective_sum.detach()),
        objective_weight=float(sums.objective_weight),
        ce_sum=float(sums.ce_sum),
        accepted_sum=float(sums.accepted_sum),
        correct=tuple(int(count) for count in sums.correct.tolist()),
        valid=tuple(int(count) for count in sums.valid.tolist()),
        n_blocks=sums.n_blocks,
        n_tokens=sums.n_tokens,
    )


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator != 0 else math.nan
