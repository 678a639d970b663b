"""Muon beside AdamW: the update by hand, the whole state as tensors, an exact restore."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from dflash.config import OptimizerConfig
from dflash.train.features import FeatureBatch
from dflash.train.inputs import Inputs
from dflash.train.models import Models, load_models
from dflash.train.optimizer import build_optimizer, optimizer_tensors, restore
from tests.unit.train.test_train_step import adamw_by_hand, inputs, make, models, stepper_of

__all__ = ["inputs", "make", "models"]  # fixtures

COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Of the quintic iteration (https://kellerjordan.github.io/posts/muon/)."""


def muon_by_hand(weights: torch.Tensor, gradients: list[torch.Tensor], lr: float, config: OptimizerConfig) -> torch.Tensor:
    """Orthogonalised Nesterov momentum of AdamW's size, arXiv 2502.16982."""
    value, buffer = weights.double(), torch.zeros_like(weights)
    a, b, c = COEFFICIENTS
    for gradient in gradients:
        buffer = config.momentum * buffer + (1 - config.momentum) * gradient
        update = (config.momentum * buffer + (1 - config.momentum) * gradient).double()
        tall = update.shape[0] > update.shape[1]
        update = update.T if tall else update
        update = update / update.norm()
        for _ in range(5):
            gram = update @ update.T
            update = a * update + (b * gram + c * gram @ gram) @ update
        update = update.T if tall else update
        value = value * (1 - lr * config.weight_decay) - lr * 0.2 * math.sqrt(max(weights.shape)) * update
    return value


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
@pytest.mark.parametrize("shape", [(8, 8), (6, 16), (16, 6)])
def test_matrices_take_muons_updates_and_vectors_adamws(shape: tuple[int, int], weight_decay: float) -> None:
    torch.manual_seed(0)
    module = torch.nn.Linear(shape[1], shape[0])
    config = OptimizerConfig(kind="muon", weight_decay=weight_decay)
    optimizer = build_optimizer(module, config, lr=0.1)
    start = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in start}
    for _ in range(2):
        for name, parameter in module.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            seen[name].append(parameter.grad.clone())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert all(parameter.grad is None for parameter in module.parameters())
    moved = module.weight.detach() - start["weight"]
    wanted = muon_by_hand(start["weight"], seen["weight"], 0.1, config) - start["weight"].double()
    # It works in bfloat16, whose rounding five products amplify.
    assert float((moved - wanted).norm()) < 0.03 * float(wanted.norm())
    torch.testing.assert_close(module.bias.double(), adamw_by_hand(start["bias"], seen["bias"], 0.1, config), rtol=1e-5, atol=1e-6)


def test_its_state_exists_from_the_start_and_a_restored_one_goes_on_bit_for_bit(
    inputs: Inputs, make: Callable[[int], FeatureBatch]
) -> None:
    optimizer = inputs.config.train.optimizer.model_copy(update={"kind": "muon"})
    config = inputs.config.model_copy(update={"train": inputs.config.train.model_copy(update={"optimizer": optimizer})})
    one, other = load_models(config), load_models(config)
    one.drafter.init_weights(1)
    matrices = {name for name, tensor in one.weights.items() if tensor.ndim == 2}
    assert {name for name in one.moments if name.endswith("momentum_buffer")} == {f"{name}.momentum_buffer" for name in matrices}
    assert len(one.moments) == len(matrices) + 3 * (len(one.weights) - len(matrices))
    assert all(float(tensor.abs().sum()) == 0 for tensor in one.moments.values())
    step(inputs, one, make(0))
    assert all(tensor is one.moments[name] for name, tensor in optimizer_tensors(one.drafter, one.optimizer).items())
    restore(other.weights, {name: tensor.clone() for name, tensor in one.weights.items()}, what="drafter")
    restore(other.moments, {name: tensor.clone() for name, tensor in one.moments.items()}, what="optimizer")
    for made in (one, other):
        step(inputs, made, make(1))
    for live, copy in ((one.weights, other.weights), (one.moments, other.moments)):
        assert all(torch.equal(tensor, copy[name]) for name, tensor in live.items())


def step(inputs: Inputs, models: Models, batch: FeatureBatch) -> None:
    stepper = stepper_of(inputs, models)
    stepper.accumulate(batch)
    assert stepper.update(lr=0.01, norm_limit=math.inf).nonfinite == ()
