"""The second half of a SwiGLU, keeping half of what autograd would: down(silu(gate) * up).

Invariant: values and gradients are those of the plain expression.
Hard decision: autograd keeps gate, up, silu(gate) and their product for every slot and layer, four widths of the largest kind
there is (17,408 in the published drafter); here gate and up are kept and two elementwise products are made again, for one
percent of a step's time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def swiglu_down(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """down(silu(gate) * up).

    Args:
        gate: [..., F].
        up: [..., F].
        weight: [D, F] of the down projection; cast to the others' dtype, as autocast would.

    Returns:
        [..., D].
    """
    output: Tensor = _SwigluDown.apply(gate, up, weight)  # type: ignore[no-untyped-call]
    return output


class _SwigluDown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        with torch.autocast(gate.device.type, enabled=False):
            return functional.linear(functional.silu(gate).mul_(up), weight.to(gate.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        gate, up, weight = ctx.saved_tensors
        pull = grads[0]
        activated = functional.silu(gate)
        rows = pull.flatten(0, -2)
        pull_weight = torch.mm(rows.t(), (activated * up).flatten(0, -2)).to(weight.dtype)
        pull_product = torch.matmul(pull, weight.to(pull.dtype))
        pull_up = activated.mul_(pull_product)
        pull_gate = torch.ops.aten.silu_backward(pull_product.mul_(up), gate)
        return pull_gate, pull_up, pull_weight
