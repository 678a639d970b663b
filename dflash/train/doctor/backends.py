"""Attention-backend check: which backend training would use here and why, and that it keeps blocks apart.

Invariant: the choice is the trainer's own (`choose_attention`, which measures forward and backward on this device), so what is
reported is what will run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash.config import DrafterConfig
from dflash.model.backends import AttentionBackend, Choice, ChunkedAttention
from dflash.model.drafter import Drafter
from dflash.model.parameters import drafter_parameter_count
from dflash.records import CheckResult
from dflash.train.doctor.leak import BLOCKS, MAX_CPU_PARAMETERS, narrow_twin

TOLERANCE = 1e-4


def attention_check(config: DrafterConfig, *, choice: Choice, device: torch.device, seed: int) -> CheckResult:
    """Report the choice, and run a block among others and alone where that costs no compilation.

    Args:
        config: the drafter section.
        choice: the trainer's.
        device: where it is to run.
        seed: of weights and inputs.
    """
    name, reason = choice.backend.name, choice.reason
    if not isinstance(choice.backend, ChunkedAttention):
        return CheckResult("attention", "ok", f"{name}: {reason}", "")
    large = device.type == "cpu" and drafter_parameter_count(config, config.hidden_size) > MAX_CPU_PARAMETERS
    off, grads_off = measure_apart(narrow_twin(config) if large else config, choice.backend, device=device, seed=seed)
    result = judge_attention(off, grads_off, label=f"{name} on {device.type}{', narrow twin' if large else ''} ({reason})")
    if result.status == "ok" and device.type == "cuda" and "asked for" not in reason:
        remedy = "nothing is wrong but speed: flex attention is several times faster where it works"
        return CheckResult("attention", "warn", f"flex attention is not used: {reason}", remedy)
    return result


def measure_apart(config: DrafterConfig, attention: AttentionBackend, *, device: torch.device, seed: int) -> tuple[float, float]:
    """Relative differences of hidden states and of gradients between blocks together and one by one."""
    drafter = Drafter(config, target_hidden_size=config.hidden_size)
    drafter.init_weights(seed)
    drafter = drafter.to(device)
    drafter.attention = attention
    generator = torch.Generator().manual_seed(seed)
    tokens = BLOCKS * config.block_size
    features = torch.randn(1, tokens, drafter.fc.weight.shape[1], generator=generator).to(device)
    embeds = torch.randn(1, BLOCKS, config.block_size, config.hidden_size, generator=generator).to(device)
    anchors = torch.tensor([[tokens * (block + 1) // (BLOCKS + 1) for block in range(BLOCKS)]], device=device)
    pull = torch.randn(embeds.shape, generator=generator).to(device)  # a fixed direction: norms would hide a plain sum
    together, grads = _pass(drafter, features, embeds, anchors, pull)
    off, apart = 0.0, torch.zeros_like(grads)
    for block in range(BLOCKS):
        own = slice(block, block + 1)
        alone, part = _pass(drafter, features, embeds[:, own], anchors[:, own], pull[:, own])
        off, apart = max(off, _relative(alone, together[:, own])), apart + part
    return off, _relative(apart, grads)


def judge_attention(off: float, grads_off: float, *, label: str) -> CheckResult:
    """Judge relative differences of hidden states and gradients."""
    text = f"{label}: a block alone equals the block among others within {max(off, grads_off):.1g}"
    if not max(off, grads_off) <= TOLERANCE:
        text = f"{label}: a block alone differs from the block among others by {max(off, grads_off):.1g}"
        return CheckResult("attention", "fail", text, "this backend mixes blocks up; set train.attention, and report this one")
    return CheckResult("attention", "ok", text, "")


def _pass(drafter: Drafter, features: Tensor, embeds: Tensor, anchors: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states, and the gradient that their product with `pull` sends to the context projection."""
    hidden: Tensor = drafter(features, embeds, anchors, torch.ones_like(anchors, dtype=torch.bool))
    (gradient,) = torch.autograd.grad((hidden * pull).sum(), (drafter.fc.weight,))
    return hidden.detach(), gradient


def _relative(first: Tensor, second: Tensor) -> float:
    return float((first - second).float().norm() / second.float().norm().clamp_min(1e-30))
