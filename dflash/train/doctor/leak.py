"""The leak test: nothing at or behind a block's anchor, and nothing of another block, may move that block.

Dimensions: S context tokens, N blocks, K block size, M taps, D width.
Invariant: the test sees what it looks for: the same block must move when the token right before its anchor does, so a drafter
that ignores its context cannot pass.
Hard decision: a drafter too large for this device is stood in for by a narrow twin with the same layers, layer types, heads
per key head, window and block size: masks and plans depend on those alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash.config import DrafterConfig
from dflash.model.backends import AttentionBackend
from dflash.model.drafter import Drafter
from dflash.model.parameters import drafter_parameter_count
from dflash.records import CheckResult

TOLERANCE = 1e-5
"""Relative movement that is rounding; a leaked token moves a block by 1e-2 and more."""
LEAST_RESPONSE = 1e-4
"""Relative movement that the last visible token must cause."""
MAX_CPU_PARAMETERS = 20_000_000
TWIN_WIDTH, TWIN_HEAD_DIM = 64, 16
BLOCKS = 3


def leak_check(
    config: DrafterConfig, *, target_hidden_size: int, attention: AttentionBackend, device: torch.device, seed: int
) -> CheckResult:
    """Perturb what a block must not see, on random weights of the configured drafter.

    Args:
        config: the drafter section.
        target_hidden_size: width of one tapped target layer.
        attention: the backend that training will use.
        device: where it is to run.
        seed: of weights and inputs.
    """
    tested, width, note = config, target_hidden_size, ""
    if device.type == "cpu" and drafter_parameter_count(config, target_hidden_size) > MAX_CPU_PARAMETERS:
        tested, width, note = narrow_twin(config), TWIN_WIDTH, " (on a narrow twin)"
    drafter = Drafter(tested, target_hidden_size=width)
    drafter.init_weights(seed)
    drafter = drafter.to(device).eval()
    drafter.attention = attention
    return judge_leak(*measure_leak(drafter, seed=seed), context_is_visible=_sees_last_token(tested), note=note)


def narrow_twin(config: DrafterConfig) -> DrafterConfig:
    """The same layers, masks and block size, narrow enough for any machine."""
    groups = config.num_attention_heads // config.num_key_value_heads
    return config.model_copy(
        update={
            "hidden_size": TWIN_WIDTH,
            "intermediate_size": 2 * TWIN_WIDTH,
            "num_attention_heads": groups,
            "num_key_value_heads": 1,
            "head_dim": TWIN_HEAD_DIM,
            "initializer_range": 0.1,
        }
    )


@torch.no_grad()
def measure_leak(drafter: Drafter, *, seed: int) -> tuple[float, float]:
    """How far a block moves, relative to its size.

    Returns:
        The largest movement by what it must not see, and the smallest by the token right before its anchor.
    """
    config = drafter.config
    device = drafter.fc.weight.device
    generator = torch.Generator().manual_seed(seed)
    tokens = BLOCKS * config.block_size + 8
    step = tokens // BLOCKS
    anchors = torch.tensor([[step - 2, 2 * step - 1, tokens - 3]], device=device)
    features = torch.randn(1, tokens, drafter.fc.weight.shape[1], generator=generator).to(device)
    embeds = torch.randn(1, BLOCKS, config.block_size, config.hidden_size, generator=generator).to(device)
    noise = torch.randn(features.shape, generator=generator).to(device)
    other = torch.randn(embeds.shape, generator=generator).to(device)
    keep = torch.ones_like(anchors, dtype=torch.bool)

    def run(seen: Tensor, blocks: Tensor) -> Tensor:
        hidden: Tensor = drafter(seen, blocks, anchors, keep)
        return hidden

    base = run(features, embeds)
    forbidden, needed = 0.0, float("inf")
    for block, anchor in enumerate(anchors[0].tolist()):
        later = features.clone()
        later[:, anchor:] += noise[:, anchor:]
        foreign = other.clone()
        foreign[:, block] = embeds[:, block]
        before = features.clone()
        before[:, anchor - 1] += noise[:, anchor - 1]
        forbidden = max(forbidden, _moved(run(later, foreign)[:, block], base[:, block]))
        needed = min(needed, _moved(run(before, embeds)[:, block], base[:, block]))
    return forbidden, needed


def judge_leak(forbidden: float, needed: float, *, context_is_visible: bool, note: str) -> CheckResult:
    """Judge relative movements; see `measure_leak`."""
    if not forbidden <= TOLERANCE:  # not a number is a failure as well
        return CheckResult(
            "leak test",
            "fail",
            f"a block moves by {forbidden:.2g} when context at or behind its anchor, or another block, changes{note}",
            "the attention shows a block its own answer: training would look perfect and accept nothing; report this backend",
        )
    if context_is_visible and not needed >= LEAST_RESPONSE:
        return CheckResult(
            "leak test",
            "fail",
            f"a block moves by {needed:.2g} only when the token before its anchor changes{note}",
            "the drafter does not see its context; check drafter.sliding_window, and report this backend",
        )
    return CheckResult(
        "leak test", "ok", f"unseen context moves a block by {forbidden:.1g}, seen context by {needed:.1g}{note}", ""
    )


def _moved(now: Tensor, before: Tensor) -> float:
    return float((now - before).float().norm() / before.float().norm().clamp_min(1e-30))


def _sees_last_token(config: DrafterConfig) -> bool:
    """Whether some layer lets some slot see the token right before the anchor."""
    return "full_attention" in config.resolved_layer_types or (config.sliding_window or 0) > 1
