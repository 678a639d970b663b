"""The direct acceptance objective: what rejection sampling would accept of a slot, against the target's own distribution.

Dimensions: R rows (supervised slots), D and D_t widths, V vocabulary; p is the target's distribution, q the drafter's.
Invariant: exact for every head that the target's `LogitRule` describes; a row's gradient is that of its own loss.
Hard decision: A = sum_v min(p, q) needs both distributions normalised before anything can be compared, so whole rows are held:
three buffers of [chunk, V], with the chunk a third of the cross-entropy's. Three GEMMs (drafter, target, back).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dflash.model.head import FrozenHead

BUFFERS = 3


class TargetStates(NamedTuple):
    """What the target itself would say at every slot.

    Attributes:
        hidden: [B, S, D_t], its last layer's state behind the final norm: the head makes its logits of it.
        anchors: [B, N] positions of the blocks.
    """

    hidden: Tensor
    anchors: Tensor

    def rows(self, blocks: Tensor, slots: Tensor) -> Tensor:
        """Rows of the flattened `hidden` that speak about slot k of flat block b*N + n: position a + k - 1 of its sequence."""
        batch, tokens = self.hidden.shape[0], self.hidden.shape[1]
        first = torch.arange(batch, device=blocks.device).unsqueeze(1) * tokens + self.anchors
        return first.flatten()[blocks] + slots - 1


class AcceptanceRows(NamedTuple):
    """The objective's R rows.

    Attributes:
        pull: [R, D] gradient of each row's loss with respect to its input, in the head's dtype.
        loss: [R] lam * KL(p || q) + (1 - lam) * (1 - A), float32.
        ce: [R] plain cross-entropy of the labels, float32.
        correct: [R] bool, the label's logit is the largest.
    """

    pull: Tensor
    loss: Tensor
    ce: Tensor
    correct: Tensor


def acceptance_rows(
    hidden: Tensor, rows: Tensor, target_hidden: Tensor, target_rows: Tensor, targets: Tensor, head: FrozenHead,
    *, eta: float, chunk_rows: int,
) -> AcceptanceRows:  # fmt: skip
    """L = lam * KL(p || q) + (1 - lam) * (1 - A) with A = sum_v min(p, q) and lam = exp(-eta * A) held fixed (arXiv 2602.23881).

    Args:
        hidden: [*, D] drafter states.
        rows: [R] indices into them.
        target_hidden: [*, D_t] final target states.
        target_rows: [R] indices into them.
        targets: [R] labels.
        head: frozen head of both.
        eta: how fast lam falls as acceptance grows.
        chunk_rows: rows of whole logits that the buffers hold together.

    Returns:
        One entry a row; nothing carries a gradient.
    """
    chunk = max(1, chunk_rows // BUFFERS)
    pull = torch.empty((len(rows), hidden.shape[1]), dtype=head.weight.dtype, device=hidden.device)
    loss, ce = (torch.empty(len(rows), dtype=torch.float32, device=hidden.device) for _ in range(2))
    correct = torch.empty(len(rows), dtype=torch.bool, device=hidden.device)
    for first in range(0, len(rows), chunk):
        part = slice(first, first + chunk)
        own = head.logits(hidden.index_select(0, rows[part]))
        theirs = head.logits(target_hidden.index_select(0, target_rows[part]))
        label_score = own.gather(1, targets[part].unsqueeze(1)).squeeze(1)
        correct[part] = label_score >= own.amax(1)
        slope = None if head.rule.soft_cap is None else 1 - (own / head.rule.soft_cap).square_()
        gradient, loss[part], own_log_total = _mixed_gradient(own, theirs, eta)
        ce[part] = own_log_total - label_score
        if slope is not None:
            gradient.mul_(slope)
        pull[part] = torch.mm(gradient.to(head.weight.dtype), head.weight) * head.rule.scale
    return AcceptanceRows(pull, loss, ce, correct)


def _mixed_gradient(own: Tensor, theirs: Tensor, eta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient with respect to the drafter's logits, the loss and the drafter's log normaliser; overwrites both inputs."""
    own_total, their_total = own.logsumexp(1), theirs.logsumexp(1)
    scratch = theirs - own
    p = theirs.sub_(their_total.unsqueeze(1)).exp_()
    divergence = scratch.mul_(p).sum(1) - their_total + own_total
    q = own.sub_(own_total.unsqueeze(1)).exp_()
    acceptance = torch.minimum(p, q, out=scratch).sum(1)
    lam = torch.exp(-eta * acceptance)
    # dA/dz = q * ([q < p] - sum_u q_u [q_u < p_u]), dKL/dz = q - p.
    gaining = torch.mul(q, q < p, out=scratch)
    share = gaining.sum(1)
    q.mul_((lam + (1 - lam) * share).unsqueeze(1)).sub_(p.mul_(lam.unsqueeze(1))).sub_(gaining.mul_((1 - lam).unsqueeze(1)))
    return q, lam * divergence + (1 - lam) * (1 - acceptance), own_total
