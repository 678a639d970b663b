"""Muon for the demo target's weight matrices: momentum, orthogonalised by five Newton-Schulz steps, in fp32.

Invariant: an update has singular values near 1 whatever the gradient's scale, so every direction of a matrix learns at the
same speed. Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks" (coefficients from there).
Hard decision: not `torch.optim.Muon`, which orthogonalises in bf16, a hundred times slower on CPUs without bf16 units.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_EPSILON = 1e-7


def orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices [N, R, C] with singular values pushed to about 1 (0.7 to 1.2), directions kept."""
    wide = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.mT
    x = wide / (wide.norm(dim=(1, 2), keepdim=True) + _EPSILON)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide is matrices else x.mT


class Muon(torch.optim.Optimizer):
    """Muon over matrices; parameters of equal shape are stepped together."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(list(parameters), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for parameter in group["params"]:
                shapes.setdefault(parameter.shape, []).append(parameter)
            group["by_shape"] = list(shapes.values())

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix from its gradient."""
        del closure
        for group in self.param_groups:
            for parameters in group["by_shape"]:
                directions = []
                for parameter in parameters:
                    buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    buffer.lerp_(parameter.grad, 1 - group["momentum"])
                    directions.append(parameter.grad.lerp(buffer, group["momentum"]))
                rows, columns = parameters[0].shape
                scale = max(1.0, rows / columns) ** 0.5
                for parameter, direction in zip(parameters, orthogonalised(torch.stack(directions)), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(direction, alpha=-group["lr"] * scale)
