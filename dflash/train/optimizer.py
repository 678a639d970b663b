"""AdamW or Muon on fp32 master weights, with the whole state as named tensors.

Invariant: the state exists from the start (torch would create it lazily), so that a snapshot always has the same
tensors and a restored optimizer continues bit for bit.
Hard decision: Muon is torch's own (`torch.optim.Muon`, arXiv 2502.16982: its updates have the size of AdamW's, so one learning rate
serves both) for the matrices and AdamW for the norms' weights. It earns its place: on the demo, equal steps, 4.50 accepted tokens
against 3.98 for a quarter more CPU time (`benchmarks/optimizers.py`). It makes its orthogonal updates by five rounds of bfloat16
products a matrix, which old CPUs are slow at, and keeps one moment instead of two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from dflash.config import OptimizerConfig
from dflash.errors import CheckpointError
from dflash.train.sharding import fill

ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")
MUON_MOMENTS = ("momentum_buffer",)
STEP = "step"


class Optimizer(Protocol):
    """What the step needs of an optimizer."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of parameters, each with its `lr`."""

    @property
    def state(self) -> Mapping[Any, dict[str, Any]]:
        """Tensors of each parameter, by name."""

    def step(self) -> Any:
        """Update the parameters from their gradients."""

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Forget the gradients."""


class MuonAndAdamW:
    """Muon for the matrices, AdamW for the vectors, as one optimizer."""

    def __init__(self, parameters: Iterable[nn.Parameter], config: OptimizerConfig, *, lr: float) -> None:
        every = list(parameters)
        self._muon = torch.optim.Muon(
            [parameter for parameter in every if parameter.ndim == 2],
            lr=lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        self._adamw = _adamw([{"params": [p for p in every if p.ndim != 2], "weight_decay": 0.0}], config, lr=lr)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of both."""
        return [*self._muon.param_groups, *self._adamw.param_groups]

    @property
    def state(self) -> Mapping[Any, dict[str, Any]]:
        """State of both."""
        return {**self._muon.state, **self._adamw.state}

    def keep(self, parameter: nn.Parameter, state: dict[str, torch.Tensor]) -> None:
        """Set a parameter's state."""
        (self._muon if parameter.ndim == 2 else self._adamw).state[parameter] = state

    def step(self) -> None:
        """Update everything."""
        self._muon.step()  # type: ignore[no-untyped-call]
        self._adamw.step()

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Forget all gradients."""
        self._muon.zero_grad(set_to_none=set_to_none)
        self._adamw.zero_grad(set_to_none=set_to_none)


def build_optimizer(module: nn.Module, config: OptimizerConfig, *, lr: float) -> Optimizer:
    """The configured optimizer over all parameters; weight decay on matrices only; moments zero."""
    parameters = list(module.parameters())
    if config.kind == "muon":
        both = MuonAndAdamW(parameters, config, lr=lr)
        for parameter in parameters:
            both.keep(parameter, _zeros(parameter, MUON_MOMENTS) if parameter.ndim == 2 else _adamw_zeros(parameter))
        return both
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = _adamw(groups, config, lr=lr)
    for parameter in parameters:
        optimizer.state[parameter] = _adamw_zeros(parameter)
    return optimizer


def optimizer_tensors(module: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """The live state, `<parameter>.<part>`; tensors keep their identity through all updates."""
    state = optimizer.state
    return {f"{name}.{part}": tensor for name, parameter in module.named_parameters() for part, tensor in state[parameter].items()}


@torch.no_grad()
def restore(live: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], *, what: str) -> None:
    """Copy saved tensors into the live ones.

    Raises:
        CheckpointError: names, shapes or dtypes differ.
    """
    if set(live) != set(saved):
        odd = sorted(set(live) ^ set(saved))
        raise CheckpointError(
            f"the {what} of the checkpoint does not fit: {len(odd)} tensor names differ, e.g. {odd[0]}",
            remedy="use the configuration that the checkpoint was made with",
        )
    for name, tensor in live.items():
        if tensor.shape != saved[name].shape or tensor.dtype != saved[name].dtype:
            raise CheckpointError(
                f"the {what} of the checkpoint does not fit: {name} is {tuple(saved[name].shape)} {saved[name].dtype}, "
                f"the configuration needs {tuple(tensor.shape)} {tensor.dtype}",
                remedy="use the configuration that the checkpoint was made with",
            )
    for name, tensor in live.items():
        fill(tensor, saved[name])


def _adamw(groups: list[dict[str, Any]], config: OptimizerConfig, *, lr: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def _adamw_zeros(parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {**_zeros(parameter, ADAMW_MOMENTS), STEP: step}


def _zeros(parameter: nn.Parameter, names: Iterable[str]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in names}
