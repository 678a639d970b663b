"""The lean norm against the library's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dflash.model.norm import rms_norm


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 4, 3, 5)], ids=str)
def test_values_and_gradients_equal_the_library(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(shape, generator=generator).requires_grad_()
    weight = torch.rand(5, generator=generator).requires_grad_()
    direction = torch.randn(shape, generator=generator)
    found, wanted = rms_norm(inputs, weight, eps=1e-3), functional.rms_norm(inputs, (5,), weight, 1e-3)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)
    gradients = [torch.autograd.grad((output * direction).sum(), (inputs, weight)) for output in (found, wanted)]
    for ours, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-6, rtol=1e-5)


def test_half_precision_stays_in_its_dtype() -> None:
    assert rms_norm(torch.ones(2, 4).bfloat16(), torch.ones(4), eps=1e-6).dtype == torch.bfloat16


def test_autocast_does_not_reach_the_library_s_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA it would turn bfloat16 into float32 there; on a CPU it does not, so its state is what can be seen here."""
    states = []
    kernel = functional.rms_norm
    monkeypatch.setattr(functional, "rms_norm", lambda *call: states.append(torch.is_autocast_enabled("cpu")) or kernel(*call))
    with torch.autocast("cpu", torch.bfloat16):
        assert rms_norm(torch.ones(2, 4).bfloat16(), torch.ones(4), eps=1e-6).dtype == torch.bfloat16
        assert torch.is_autocast_enabled("cpu")
    assert states == [False]


def test_no_normalised_copy_is_kept() -> None:
    inputs, weight = torch.randn(64, 32, requires_grad=True), torch.ones(32, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rms_norm(inputs, weight, eps=1e-6)
    assert sum(kept.values()) == inputs.numel() + len(weight) + 64
