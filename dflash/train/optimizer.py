"""AdamW on fp32 master weights, with its whole state as named tensors.

Invariant: the state exists from the start (torch would create it lazily), so that a snapshot always has the same
tensors and a restored optimizer continues bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from dflash.config import OptimizerConfig
from dflash.errors import CheckpointError

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"


def build_optimizer(module: nn.Module, config: OptimizerConfig, *, lr: float) -> torch.optim.AdamW:
    """AdamW over all parameters; weight decay on matrices only; moments zero."""
    parameters = dict(module.named_parameters())
    matrices = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
    for parameter in parameters.values():
        moments = {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in MOMENTS}
        optimizer.state[parameter] = {STEP: torch.zeros((), dtype=torch.float32, device=parameter.device), **moments}
    return optimizer


def optimizer_tensors(module: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    """The live state, `<parameter>.<moment>`; tensors keep their identity through all updates."""
    return {
        f"{name}.{part}": optimizer.state[parameter][part]
        for name, parameter in module.named_parameters()
        for part in (*MOMENTS, STEP)
    }


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
        tensor.copy_(saved[name])
