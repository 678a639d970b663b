"""The training objective over block slots, against the target's frozen head, without ever holding full logits.

Dimensions: B batch, N blocks, K block size, D width, V vocabulary, R supervised slots (rows) of the batch.
Invariants: only supervised slots go through the head; the objective is an unnormalised sum with its weight beside it, so
that gradients and denominators can be summed over micro-batches and ranks and divided once; plain cross-entropy is summed
separately and is what runs are compared by.
Hard decision: the head is frozen and needs no gradient, so each chunk computes loss and gradient at once in the forward:
logits GEMM, softmax in place, dh = w * (P @ W - W[t]). Two GEMMs, no recomputation, and the weight and the one-hot are applied
in the narrow [rows, D] space (0.61 of a full cross-entropy's time on a CPU). Chunks hold whole blocks, because D-PACE
multiplies along a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash.config import LossConfig
from dflash.model.anchors import BlockLabels


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


def block_loss(hidden: Tensor, labels: BlockLabels, keep: Tensor, head_weight: Tensor, *, loss: LossConfig) -> LossSums:
    """Objective, plain cross-entropy and accuracy of a batch of blocks.

    The objective is sum_k w_k * CE_k with w_k = exp(-(k-1)/gamma) for `decay`, and the weights of D-PACE
    (arXiv 2605.18810) for `dpace`; divide by `objective_weight`, the sum of the weights, for the mean. A slot is correct
    iff its label's logit is the largest (ties count as correct).

    Args:
        hidden: [B, N, K, D], after the drafter's final norm.
        labels: [B, N, K] labels and supervision.
        keep: [B, N] flags of real blocks.
        head_weight: [V, D], frozen.
        loss: objective.

    Returns:
        Sums; `objective_sum.backward()` sends the gradient to `hidden`.
    """
    slots = hidden.shape[2] - 1
    valid = (labels.valid & keep.unsqueeze(-1))[..., 1:].flatten(0, 1)  # [B*N, K-1]
    blocks = valid.any(-1).nonzero().squeeze(1)
    valid = valid.index_select(0, blocks)
    targets = labels.labels[..., 1:].flatten(0, 1).index_select(0, blocks)
    rows = (blocks.unsqueeze(1) * (slots + 1) + torch.arange(1, slots + 1, device=blocks.device))[valid]
    objective, weight, ce, correct = _FrozenHeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, 2), rows, targets[valid], valid, head_weight, loss
    )
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


class _FrozenHeadLoss(torch.autograd.Function):
    """Sums over the supervised rows, with the gradient with respect to `hidden` computed chunk by chunk in the forward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, rows: Tensor, targets: Tensor, valid: Tensor, head_weight: Tensor, loss: LossConfig
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        counts = valid.sum(1).tolist()
        blocks_per_chunk = max(1, loss.head_chunk_rows // valid.shape[1])
        gradient = torch.empty((len(rows), hidden.shape[1]), dtype=head_weight.dtype, device=hidden.device)
        correct = torch.zeros_like(valid)
        sums = torch.zeros(3, dtype=torch.float32, device=hidden.device)
        largest = max((sum(counts[i : i + blocks_per_chunk]) for i in range(0, len(counts), blocks_per_chunk)), default=0)
        buffer = torch.empty((largest, len(head_weight)), dtype=head_weight.dtype, device=hidden.device)
        done = 0
        with torch.autocast(hidden.device.type, enabled=False):
            for first in range(0, len(counts), blocks_per_chunk):
                seen = valid[first : first + blocks_per_chunk]
                part = slice(done, done + sum(counts[first : first + blocks_per_chunk]))
                done = part.stop
                inputs = hidden.index_select(0, rows[part]).to(head_weight.dtype)
                pull, ce, hits = _head_chunk(inputs, targets[part], head_weight, buffer[: len(inputs)])
                weights = _slot_weights(ce, seen, loss)
                gradient[part] = pull.mul_(weights.unsqueeze(1))
                correct[first : first + blocks_per_chunk][seen] = hits
                sums += torch.stack(((weights * ce).sum(), weights.sum(), ce.sum()))
        ctx.save_for_backward(rows, gradient)
        ctx.shape, ctx.dtype = hidden.shape, hidden.dtype
        objective, weight, plain = sums.unbind()
        ctx.mark_non_differentiable(weight, plain, correct)
        return objective.clone(), weight, plain, correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, gradient = ctx.saved_tensors
        full = torch.zeros(ctx.shape, dtype=ctx.dtype, device=gradient.device)
        full.index_copy_(0, rows, (gradient * grads[0]).to(ctx.dtype))
        return full, None, None, None, None, None


def _head_chunk(inputs: Tensor, targets: Tensor, head_weight: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of each row's CE with respect to its input, the CE (float32) and whether the label wins; fills `logits`."""
    torch.mm(inputs, head_weight.t(), out=logits)
    scores = logits.float()  # no copy in float32, which is the CPU's case
    peak = scores.amax(1)
    label_score = scores.gather(1, targets.unsqueeze(1)).squeeze(1)
    exponentials = scores.sub_(peak.unsqueeze(1)).exp_()
    total = exponentials.sum(1)
    ce = total.log() + peak - label_score
    expected = torch.mm(exponentials.to(head_weight.dtype), head_weight)
    pull = expected / total.unsqueeze(1).to(expected.dtype) - head_weight.index_select(0, targets)
    return pull, ce, label_score >= peak


def _slot_weights(ce: Tensor, valid: Tensor, loss: LossConfig) -> Tensor:
    """Weights of the supervised slots of whole blocks, in row order; `valid` is [blocks, K-1]."""
    if loss.objective == "decay":
        decay = torch.exp(-torch.arange(valid.shape[1], device=ce.device, dtype=torch.float32) / loss.gamma)
        return decay.expand(valid.shape)[valid]
    certainty = torch.ones(valid.shape, dtype=torch.float32, device=ce.device)
    certainty[valid] = (1 - loss.alpha) * torch.exp(-ce) + loss.alpha
    survival = certainty.cumprod(1) * valid
    return survival.flip(1).cumsum(1).flip(1)[valid]
