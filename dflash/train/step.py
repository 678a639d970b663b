"""The optimizer step: accumulate unnormalised gradients, sum them over the ranks, divide once, clip, vote, update.

Dimensions: K block size.
Invariant: an update is applied only if the objective, its weight and the gradient norm are finite on all ranks; a skipped one
changes neither weights nor moments. Numerators are back-propagated unnormalised and divided once by the summed
denominators, so any split into micro-batches and replicas gives the same gradient up to rounding.
With several ranks all gradients are views of one flat buffer: autograd adds into it, and one all-reduce sums it. Of a sharded
drafter each rank has its part of the summed gradient already after the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dflash.config import LossConfig
from dflash.model.drafter import Drafter
from dflash.model.head import FrozenHead
from dflash.model.loss import LossSums, block_loss
from dflash.train.features import FeatureBatch
from dflash.train.group import Group
from dflash.train.optimizer import Optimizer
from dflash.train.sharding import is_sharded, join_pass, own_part


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
        sums: one entry a micro-batch of all ranks, in plan order.
        grad_norm: before clipping, of the normalised gradient (NaN or infinite when it was).
        clip_coef: factor applied; NaN when skipped.
        nonfinite: names of the quantities that forbade the update.
        over_limit: the gradient norm forbade it, although finite.

    """

    sums: tuple[Sums, ...]
    grad_norm: float
    clip_coef: float
    nonfinite: tuple[str, ...]
    over_limit: bool

    @property
    def skipped(self) -> bool:
        """Whether the update was not applied."""
        return bool(self.nonfinite) or self.over_limit

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
        optimizer: Optimizer,
        *,
        head: FrozenHead,
        loss: LossConfig,
        clip_norm: float,
        autocast_dtype: torch.dtype | None,
        group: Group,
    ) -> None:
        self._drafter = drafter
        self._optimizer = optimizer
        self._head = head
        self._loss = loss
        self._clip_norm = clip_norm
        self._autocast_dtype = autocast_dtype
        self._group = group
        self._parameters = list(drafter.parameters())
        self._sharded = is_sharded(drafter)
        self._flat = _flat_gradients(self._parameters) if group.size > 1 and not self._sharded else None
        self._pending: list[tuple[int, LossSums]] = []

    def accumulate(self, batch: FeatureBatch) -> None:
        """Forward and backward of one micro-batch."""
        with self._autocast(batch.features.device.type):
            hidden = self._drafter(batch.features, batch.block_embeds, batch.anchors.positions, batch.anchors.keep)
        sums = block_loss(hidden, batch.labels, batch.anchors.keep, self._head, loss=self._loss, target=batch.target_states)
        sums.objective_sum.backward()  # type: ignore[no-untyped-call]
        self._pending.append((batch.planned.position, sums))

    def join_others(self, passes: int) -> None:
        """Take part in passes of ranks that have more micro-batches in this step; only a sharded drafter needs that."""
        if self._sharded:
            for _ in range(passes):
                with self._autocast(self._parameters[0].device.type):
                    join_pass(self._drafter)

    def update(self, *, lr: float, norm_limit: float) -> Update:
        """Apply (or skip) the update of everything accumulated on all ranks, and forget the gradients.

        Args:
            lr: learning rate.
            norm_limit: gradient norm over which the update is skipped; may be infinite.

        Raises:
            BrokenGroupError: another rank died or stalled.
        """
        sums = self._sums_of_all()
        if self._flat is not None:
            self._group.sum_(self._flat)
        gradients = [own_part(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        weight = sum(item.objective_weight for item in sums)
        grad_norm = _ratio(self._norm(gradients), weight)
        nonfinite = _vote(sums, grad_norm)
        over_limit = not nonfinite and grad_norm > norm_limit
        clip_coef = math.nan
        if not nonfinite and not over_limit:
            clip_coef = 1.0 if grad_norm <= self._clip_norm else self._clip_norm / grad_norm
            for gradient in gradients:
                gradient.mul_(clip_coef / weight)
            for param_group in self._optimizer.param_groups:
                param_group["lr"] = lr
            self._optimizer.step()
        if self._flat is None:
            self._optimizer.zero_grad(set_to_none=True)
        else:
            self._flat.zero_()
        self._pending.clear()
        return Update(sums=sums, grad_norm=grad_norm, clip_coef=clip_coef, nonfinite=nonfinite, over_limit=over_limit)

    def weight_sum(self) -> float:
        """Sum of all weights in float64: equal on all ranks as long as they made the same updates, or share the weights."""
        own = float(torch.stack([own_part(parameter.detach()).sum(dtype=torch.float64) for parameter in self._parameters]).sum())
        return float(sum(self._group.gather(own))) if self._sharded else own

    def _norm(self, gradients: Sequence[torch.Tensor]) -> float:
        """Of the whole gradient; the ranks' parts are added in the same order everywhere."""
        own = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        return math.sqrt(sum(part**2 for part in self._group.gather(own))) if self._sharded else own

    def _autocast(self, device_type: str) -> torch.autocast:
        return torch.autocast(device_type, dtype=self._autocast_dtype, enabled=self._autocast_dtype is not None)

    def _sums_of_all(self) -> tuple[Sums, ...]:
        """Every rank's numbers in plan order, so that their totals do not depend on who computed what."""
        own = [(position, asdict(_numbers(item))) for position, item in self._pending]
        every = [entry for entries in self._group.gather(own) for entry in entries]
        return tuple(_as_sums(item) for _, item in sorted(every, key=lambda entry: entry[0]))


def _flat_gradients(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """One zeroed buffer whose stretches become the parameters' gradients."""
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device)
    begin = 0
    for parameter in parameters:
        parameter.grad = flat[begin : begin + parameter.numel()].view_as(parameter)
        begin += parameter.numel()
    return flat


def _as_sums(item: dict[str, Any]) -> Sums:
    return Sums(**(item | {"correct": tuple(item["correct"]), "valid": tuple(item["valid"])}))


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
