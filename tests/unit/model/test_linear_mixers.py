"""Finding the modules that update recurrent states, and giving them up where a replay cannot be proven."""

from __future__ import annotations

import logging

import pytest
import torch
from model_fixtures import FAMILIES, tiny_model, tiny_target
from transformers import DynamicCache

from dflash.model.linear_mixers import LinearMixers, Snapshot, find_mixers, states_differ

IDS = torch.tensor([[5, 9, 2, 33, 17, 8]])


@pytest.mark.parametrize("family", FAMILIES)
def test_mixers_are_found_by_what_they_do(family: str) -> None:
    model = tiny_model(family)
    kv = DynamicCache(config=model.config)
    layers = model.get_decoder().layers
    with torch.no_grad():
        found = find_mixers(layers, kv, lambda: model(input_ids=IDS, cache=kv, use_cache=True))
    recurrent = {index for index, layer in enumerate(layers) if hasattr(layer, "linear_attn")}
    assert found is not None and found.keys() == recurrent
    assert all(found[index] is layers[index].linear_attn for index in recurrent)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in layers.modules())


def test_a_state_that_two_modules_update_has_no_mixer() -> None:
    model = tiny_model("qwen3_5")
    kv = DynamicCache(config=model.config)

    def twice() -> None:
        model(input_ids=IDS[:, :3], cache=kv, use_cache=True)
        model(input_ids=IDS[:, 3:], cache=kv, use_cache=True)

    with torch.no_grad():
        assert find_mixers(model.get_decoder().layers, kv, twice) is None


def test_a_replay_that_does_not_restore_the_state_is_noticed_on_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LinearMixers, "replay", lambda *_, **__: None)
    with caplog.at_level(logging.WARNING):
        target = tiny_target("qwen3_5")
    assert target.has_recurrent_state and not target.replays_mixers
    assert "rerunning the mixers is off by" in caplog.text and "fed again" in caplog.text


def test_a_snapshot_survives_the_forward_that_updates_the_states_in_place() -> None:
    model = tiny_model("qwen3_5")
    kv, other = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with torch.no_grad():
        for cache in (kv, other):
            model(input_ids=IDS, cache=cache, use_cache=True)
        layers = [layer for layer in kv.layers if hasattr(layer, "recurrent_states")]
        wanted = [layer for layer in other.layers if hasattr(layer, "recurrent_states")]
        snapshot = Snapshot.of(layers, None)
        model(input_ids=IDS[:, :4], cache=kv, use_cache=True)
        assert states_differ(layers, wanted) > 0.1
        snapshot.restore(layers)
    assert states_differ(layers, wanted) == 0.0
