"""How close a mixture of experts came to choosing another expert: the second kind of near-tie.

Two correct paths differ by 1e-5; where the last chosen expert leads the first refused one by less, they may choose different
experts, and the logits then differ by far more than rounding. Routers are found by their class name, the one thing that
the library's families share; a target without any has no such ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from dflash.model.target import Target

ROUTER_TIE = 1e-4
"""Gap of router logits under which two correct paths may choose different experts."""


def router_gap(target: Target, prompt_ids: Sequence[int], answer: Sequence[int]) -> float:
    """Smallest lead of a chosen expert over a refused one while an answer is fed one token at a time.

    The prompt is left out: every path feeds it in the same forward.

    Returns:
        A difference of router logits; infinite for a target without experts.
    """
    chosen = getattr(target.model.config.get_text_config(), "num_experts_per_tok", None)
    if not chosen:
        return float("inf")
    _, _, cache = target.prefill([prompt_ids], with_taps=False)
    with RouterWatch(target.model, experts_per_token=chosen) as watch:
        for token in answer:
            target.logits_cached(torch.tensor([[token]], device=target.device), cache)
    return watch.smallest_gap


class RouterWatch:
    """Smallest gap between a chosen and a refused expert while it is open.

    Args:
        model: hooks are put on its routers and taken off again.
        experts_per_token: how many are chosen.
    """

    def __init__(self, model: nn.Module, *, experts_per_token: int) -> None:
        self._model = model
        self._chosen = experts_per_token
        self._handles: list[Any] = []
        self.smallest_gap = float("inf")

    def __enter__(self) -> RouterWatch:
        routers = [module for module in self._model.modules() if "Router" in type(module).__name__]
        self._handles = [router.register_forward_hook(self._look) for router in routers]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()

    def _look(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        if not isinstance(logits, Tensor) or logits.shape[-1] <= self._chosen:
            return
        top = torch.topk(logits.float(), self._chosen + 1, dim=-1).values
        self.smallest_gap = min(self.smallest_gap, float((top[..., -2] - top[..., -1]).min()))
