"""The near-tie of a router: measured where it is, infinite where there are no experts."""

from __future__ import annotations

import pytest
import torch
from families import make_target, prompts

from dflash.evaluate.decode import DecodeLimits, plain_decode
from dflash.evaluate.lossless import explain_difference
from dflash.evaluate.routing import ROUTER_TIE, router_gap
from dflash.model.sampling import GREEDY
from dflash.model.target import Target

torch.set_num_threads(1)
LIMITS = DecodeLimits(max_new_tokens=8, stop_ids=frozenset())


def by_hand(target: Target, prompt: list[int], answer: list[int]) -> float:
    """Recomputed from every router's weights and the states that reach it, in one forward without a cache."""
    gaps: list[float] = []

    def look(router: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        states = inputs[0].reshape(-1, inputs[0].shape[-1])[len(prompt) :]
        ordered = (states @ router.weight.T).sort(dim=-1, descending=True).values
        gaps.append(float((ordered[:, 1] - ordered[:, 2]).min()))

    handles = [m.register_forward_pre_hook(look) for m in target.model.modules() if type(m).__name__ == "Qwen3MoeTopKRouter"]
    with torch.no_grad():
        target.model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False)
    for handle in handles:
        handle.remove()
    return min(gaps)


def test_the_gap_is_the_lead_of_the_last_chosen_expert_over_the_first_refused_one() -> None:
    target = make_target("qwen3_moe")
    (prompt,) = prompts(1)
    answer = [5, 17, 33]
    hooks = sum(len(module._forward_hooks) for module in target.model.modules())
    assert router_gap(target, prompt, answer) == pytest.approx(by_hand(target, prompt, answer), abs=1e-3)
    assert router_gap(make_target("qwen3"), prompt, answer) == float("inf")
    assert sum(len(module._forward_hooks) for module in target.model.modules()) == hooks


def test_a_difference_behind_a_router_tie_is_excused_and_one_without_is_not() -> None:
    target = make_target("qwen3_moe")
    (prompt,) = prompts(1)
    plain = list(plain_decode(target, prompt, limits=LIMITS).tokens)
    # Another token at 4, and whatever follows from it: far from a tie of logits.
    other = [*plain[:4], (plain[4] + 1) % 61]
    other += plain_decode(target, [*prompt, *other], limits=DecodeLimits(3, frozenset())).tokens

    def judged() -> object:
        return explain_difference(
            target, prompt, answers=(plain, other), limits=LIMITS, sampling=GREEDY, key="", block_size=4, near_tie_factor=4.0
        )

    refused = judged()
    assert refused.position == 4 and refused.router_gap > ROUTER_TIE and not refused.excused
    router = target.model.model.layers[0].mlp.gate
    with torch.no_grad():  # two experts with the same weights lead by nothing over each other
        router.weight.copy_(router.weight[:1].expand_as(router.weight))
    excused = judged()
    assert excused.router_gap < ROUTER_TIE and excused.excused
