"""Root-mean-square norm, keeping on a CPU what its backward cannot do without.

Invariant: values and gradients are those of `functional.rms_norm`.
Hard decision: on a CPU that function is a chain of elementwise operations, whose backward keeps a normalised copy of every input;
here the input and one number a vector are kept. On a GPU the library has a fused kernel, which stays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(inputs: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Normalise the last dimension and scale it.

    Args:
        inputs: [..., D].
        weight: [D].
        eps: added to the mean square.

    Returns:
        [..., D] in the inputs' dtype.
    """
    lean = inputs.device.type == "cpu" and inputs.dtype == torch.float32 and torch.is_grad_enabled()
    if lean and not torch.compiler.is_compiling():  # a compiler fuses it by itself
        output: Tensor = _RmsNorm.apply(inputs, weight, eps)  # type: ignore[no-untyped-call]
        return output
    # Decoding enters here for every norm, and an autocast context costs as much as the norm itself.
    if not torch.is_autocast_enabled(inputs.device.type):
        return functional.rms_norm(inputs, weight.shape, weight.to(inputs.dtype), eps)
    with torch.autocast(inputs.device.type, enabled=False):
        return functional.rms_norm(inputs, weight.shape, weight.to(inputs.dtype), eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = inputs.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(inputs, weight, scale)
        return (inputs * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, scale = ctx.saved_tensors
        pull = grads[0]
        normed = inputs * scale
        product = pull * normed
        pull_weight = product.reshape(-1, len(weight)).sum(0)
        along = torch.mv(product.reshape(-1, len(weight)), weight).view(scale.shape).div_(inputs.shape[-1])
        return (pull * weight).sub_(normed.mul_(along)).mul_(scale), pull_weight, None
