"""Scales and soft caps behind the head, found by name and believed by measurement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from model_fixtures import FAMILIES, info_of, tiny_target
from transformers import AutoModelForCausalLM

from dflash.errors import TargetError
from dflash.model.logit_rule import LogitRule
from dflash.model.target import Target

IDS = torch.tensor([[5, 9, 2, 33, 17, 8, 60, 1]])
LENGTHS = torch.tensor([8])
PLAIN = {name: value for name, value in FAMILIES["llama"][1].items() if name != "head_dim"}
SCALED: dict[str, tuple[str, dict[str, Any], LogitRule]] = {
    "cohere": ("CohereConfig", {**PLAIN, "logit_scale": 0.25}, LogitRule(0.25, None)),
    "granite": ("GraniteConfig", {**PLAIN, "logits_scaling": 4.0}, LogitRule(0.25, None)),
    "gemma2": (
        "Gemma2Config",
        {**FAMILIES["gemma3"][1], "final_logit_softcapping": 3.0, "attn_logit_softcapping": 20.0},
        LogitRule(1.0, 3.0),
    ),
}


def make(name: str) -> Target:
    kind, arguments, _ = SCALED[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**arguments)).eval()
    return Target(model, info=info_of(model), target_layer_ids=(0, 1))


@pytest.mark.parametrize("name", SCALED)
def test_the_rule_turns_the_final_state_into_the_models_own_logits(name: str) -> None:
    target = make(name)
    assert target.logit_rule == SCALED[name][2]
    _, final = target.features_with_final(IDS, LENGTHS)
    with torch.no_grad():
        own = target.model(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(target.logit_rule.apply(target.logits(final)), own, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(target.logits(final), own, atol=1e-2), "the rule would not matter here"


@pytest.mark.parametrize("family", FAMILIES)
def test_most_families_have_no_rule_and_their_final_state_gives_their_logits(family: str) -> None:
    target = tiny_target(family)
    assert target.logit_rule == LogitRule(1.0, None)
    taps, final = target.features_with_final(IDS, LENGTHS)
    with torch.no_grad():
        own = target.model(input_ids=IDS, use_cache=False).logits
    assert torch.equal(taps, target.features(IDS, LENGTHS))
    assert torch.equal(target.logits(final), own)


def test_padding_of_the_final_state_is_zeroed() -> None:
    _, final = tiny_target("qwen3").features_with_final(IDS, torch.tensor([5]))
    assert bool((final[0, 5:] == 0).all()) and bool((final[0, :5] != 0).any())
    assert not final.is_inference() and not final.requires_grad


def test_an_unknown_rule_is_refused_where_the_distribution_is_needed_and_only_there() -> None:
    config = transformers.LlamaConfig(**PLAIN)
    model = AutoModelForCausalLM.from_config(config).eval()
    original = model.forward

    def cubed(*arguments: Any, **named: Any) -> Any:
        output = original(*arguments, **named)
        output.logits = output.logits**3
        return output

    model.forward = cubed
    target = Target(model, info=info_of(model), target_layer_ids=(0, 1))
    assert target.features(IDS, LENGTHS).shape == (1, 8, 64)
    with pytest.raises(TargetError, match="not a scaled or soft-capped product"):
        _ = target.logit_rule
