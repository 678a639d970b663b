"""The training objective over block slots, against the target's frozen head, without ever holding full logits.

Dimensions: B batch, N blocks, K block size, D width, V vocabulary, R supervised slots (rows) of the batch.
Invariants: only supervised slots go through the head; the objective is an unnormalised sum with its weight beside it, so
that gradients and denominators can be summed over micro-batches and ranks and divided once; plain cross-entropy is summed
separately and is what runs are compared by.
Hard decision: loss and gradient come out of the forward together (the head is frozen and needs none), row by row and
unweighted; slot weights meet them afterwards in the narrow [R, D] space. So neither the tiles of the head nor their order
have to know blocks, although D-PACE multiplies along them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash.config import LossConfig
from dflash.errors import DrafterError
from dflash.model.acceptance import TargetStates, acceptance_rows
from dflash.model.anchors import BlockLabels
from dflash.model.head import FrozenHead, label_rows


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums and counts of one micro-batch; tensors stay on the device until they are read.

    Attributes:
        objective_sum: scalar, unnormalised; the only one that carries a gradient.
        objective_weight: scalar, sum of the (detached) slot weights: the objective's denominator.
        ce_sum: scalar, plain cross-entropy summed over the supervised slots.
        accepted_sum: scalar, sum over blocks of the longest correct prefix (honest block proxy of accepted drafts).
        correct, valid: [K-1] int64, correct predictions and supervised slots at k = 1..K-1.
        n_blocks: kept anchors.
        n_tokens: supervised slots.
    """

    objective_sum: Tensor
    objective_weight: Tensor
    ce_sum: Tensor
    accepted_sum: Tensor
    correct: Tensor
    valid: Tensor
    n_blocks: int
    n_tokens: int


def block_loss(
    hidden: Tensor, labels: BlockLabels, keep: Tensor, head: FrozenHead, *, loss: LossConfig, target: TargetStates | None
) -> LossSums:
    """Objective, plain cross-entropy and accuracy of a batch of blocks.

    The objective is sum_k w_k * L_k, to be divided by `objective_weight`, the sum of the (detached) weights:
    `decay` and `dpace` take the cross-entropy for L_k and w_k = exp(-(k-1)/gamma), or the weights of D-PACE
    (arXiv 2605.18810); `acceptance` takes lam * KL(p||q) + (1-lam) * (1-A) against the target's distribution
    (arXiv 2602.23881) with the weights of `decay`. A slot is correct iff its label's logit is the largest (ties count).

    Args:
        hidden: [B, N, K, D], after the drafter's final norm.
        labels: [B, N, K] labels and supervision.
        keep: [B, N] flags of real blocks.
        head: frozen.
        loss: objective.
        target: the target's own states, for `acceptance`; not looked at otherwise.

    Returns:
        Sums; `objective_sum.backward()` sends the gradient to `hidden`.

    Raises:
        DrafterError: `acceptance` without the target's states.
    """
    slots = hidden.shape[2] - 1
    valid = (labels.valid & keep.unsqueeze(-1))[..., 1:].flatten(0, 1)  # [B*N, K-1]
    blocks = valid.any(-1).nonzero().squeeze(1)
    valid = valid.index_select(0, blocks)
    targets = labels.labels[..., 1:].flatten(0, 1).index_select(0, blocks)[valid]
    slot = torch.arange(1, slots + 1, device=blocks.device)
    rows = (blocks.unsqueeze(1) * (slots + 1) + slot)[valid]
    target_rows = None
    if loss.objective == "acceptance":
        if target is None:
            raise DrafterError(
                "the acceptance objective was given no states of the target's last layer",
                remedy="make the features with `features_with_final`, or choose the objective decay or dpace",
            )
        target_rows = target.rows(blocks.unsqueeze(1), slot)[valid]
    work = _Work(rows, targets, valid, head, loss, None if target is None else target.hidden, target_rows)
    objective, weight, ce, correct = _FrozenHeadLoss.apply(hidden.flatten(0, 2), work)  # type: ignore[no-untyped-call]
    return LossSums(
        objective_sum=objective,
        objective_weight=weight,
        ce_sum=ce,
        accepted_sum=correct.to(torch.uint8).cumprod(1).sum(),
        correct=correct.sum(0),
        valid=valid.sum(0),
        n_blocks=int(keep.sum()),
        n_tokens=len(rows),
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """Rows [R] of the supervised slots with their labels, and `valid` [blocks, K-1], true R times, in row order."""

    rows: Tensor
    targets: Tensor
    valid: Tensor
    head: FrozenHead
    loss: LossConfig
    target_hidden: Tensor | None
    target_rows: Tensor | None

    def measure(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradient [R, D], loss, cross-entropy and correctness [R] of every row, unweighted."""
        if self.target_hidden is None or self.target_rows is None:
            found = label_rows(hidden, self.rows, self.targets, self.head, chunk_rows=self.loss.head_chunk_rows)
            return found.pull, found.ce, found.ce, found.correct
        return acceptance_rows(
            hidden,
            self.rows,
            self.target_hidden.flatten(0, 1),
            self.target_rows,
            self.targets,
            self.head,
            eta=self.loss.eta,
            chunk_rows=self.loss.head_chunk_rows,
        )


class _FrozenHeadLoss(torch.autograd.Function):
    """Sums over the supervised rows, with the gradient with respect to `hidden` computed in the forward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, work: _Work) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch.autocast(hidden.device.type, enabled=False):
            gradient, loss, ce, hits = work.measure(hidden)
        weights = _slot_weights(ce, work.valid, work.loss)
        gradient.mul_(weights.unsqueeze(1))
        correct = torch.zeros_like(work.valid)
        correct[work.valid] = hits
        ctx.save_for_backward(work.rows, gradient)
        ctx.shape, ctx.dtype = hidden.shape, hidden.dtype
        weight, plain = weights.sum(), ce.sum()
        ctx.mark_non_differentiable(weight, plain, correct)
        return (weights * loss).sum(), weight, plain, correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, gradient = ctx.saved_tensors
        full = torch.zeros(ctx.shape, dtype=ctx.dtype, device=gradient.device)
        full.index_copy_(0, rows, (gradient * grads[0]).to(ctx.dtype))
        return full, None


def _slot_weights(ce: Tensor, valid: Tensor, loss: LossConfig) -> Tensor:
    """Weights of the supervised slots of whole blocks, in row order; `valid` is [blocks, K-1]."""
    if loss.objective != "dpace":
        decay = torch.exp(-torch.arange(valid.shape[1], device=ce.device, dtype=torch.float32) / loss.gamma)
        return decay.expand(valid.shape)[valid]
    certainty = torch.ones(valid.shape, dtype=torch.float32, device=ce.device)
    certainty[valid] = (1 - loss.alpha) * torch.exp(-ce) + loss.alpha
    survival = certainty.cumprod(1) * valid
    return survival.flip(1).cumsum(1).flip(1)[valid]
