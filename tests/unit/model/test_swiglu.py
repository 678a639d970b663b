"""The lean SwiGLU against the plain expression."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dflash.model.swiglu import swiglu_down


def _plain(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(functional.silu(gate) * up, weight)


def _leaves(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 5, 12), (3, 5, 12), (7, 12))
    gate, up, weight = (torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes)
    return gate, up, weight


def test_values_and_gradients_equal_the_plain_expression() -> None:
    leaves = _leaves(torch.float64)
    assert torch.autograd.gradcheck(swiglu_down, leaves)
    direction = torch.randn(3, 5, 7, dtype=torch.float64)
    found = torch.autograd.grad((swiglu_down(*leaves) * direction).sum(), leaves)
    wanted = torch.autograd.grad((_plain(*leaves) * direction).sum(), leaves)
    for ours, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-12, rtol=1e-12)


def test_mixed_precision_keeps_the_weight_and_its_gradient_in_float32() -> None:
    gate, up, weight = _leaves(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = swiglu_down(gate.bfloat16(), up.bfloat16(), weight)
        wanted = _plain(gate.bfloat16(), up.bfloat16(), weight)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted)
    ours, reference = (torch.autograd.grad(output.float().square().sum(), weight)[0] for output in (found, wanted))
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, reference, atol=0.3, rtol=0.02)


@pytest.mark.parametrize(("function", "widths"), [(swiglu_down, 2), (_plain, 4)], ids=["lean", "plain"])
def test_half_of_the_wide_tensors_are_kept(function: object, widths: int) -> None:
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape[-1] == 12 and tensor.ndim > 1 and tensor.shape[0] != 7:
            kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    leaves = _leaves(torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function(*leaves)  # type: ignore[operator]
    assert sum(kept.values()) == widths * leaves[0].numel()
