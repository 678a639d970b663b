"""The target adapter on several families: taps, early end, padding, embedding, head, loading and refusing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_fixtures import FAMILIES, WIDTH, count_calls, drafter_config, info_of, load_golden, tiny_drafter, tiny_model, tiny_target
from safetensors.torch import load_file, save_file
from torch import nn

from dflash.config import TargetConfig
from dflash.errors import TargetError
from dflash.model.taps import LayerTaps
from dflash.model.target import Target, load_target

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 9, 2, 33, 17, 8, 60, 1], [4, 4, 12, 50, 3, 0, 0, 0]])
LENGTHS = torch.tensor([8, 5])
families = pytest.mark.parametrize("family", FAMILIES)


@pytest.mark.parametrize("name", ["full", "sliding"])
def test_features_equal_the_reference_implementation(name: str) -> None:
    golden = load_golden(name)
    lengths = torch.full((len(golden.input_ids),), golden.input_ids.shape[1])
    features = golden.target.features(golden.input_ids, lengths)
    torch.testing.assert_close(features, golden.forward["context_features"], atol=2e-5, rtol=1e-5)


@families
def test_taps_are_the_hidden_states_behind_each_layer(family: str) -> None:
    layers = (0, 1) if family == "qwen3_moe" else (0, 2)
    target = tiny_target(family, layer_ids=layers)
    states = target.model(input_ids=IDS[:1], output_hidden_states=True, use_cache=False).hidden_states
    wanted = torch.cat([states[layer + 1] for layer in layers], dim=-1)
    assert torch.equal(target.features(IDS[:1], LENGTHS[:1]), wanted)


@families
def test_layers_above_the_last_tap_and_the_head_do_not_run(family: str) -> None:
    target = tiny_target(family, layer_ids=(0, 1))
    layers = target.model.get_decoder().layers
    layer_calls = count_calls(layers)
    head_calls = count_calls(nn.ModuleList([target.model.get_output_embeddings()]))
    target.features(IDS, LENGTHS)
    assert layer_calls == [1, 1] + [0] * (len(layers) - 2)
    assert head_calls == [0]


@families
def test_right_padding_does_not_move_real_positions_and_is_zeroed(family: str) -> None:
    target = tiny_target(family)
    padded = target.features(IDS, LENGTHS)
    alone = target.features(IDS[1:, :5], LENGTHS[1:])
    torch.testing.assert_close(padded[1, :5], alone[0], atol=2e-4, rtol=2e-4)
    assert torch.equal(padded[1, 5:], torch.zeros(3, 2 * WIDTH))


def test_features_and_embeddings_may_enter_a_trainable_layer() -> None:
    """A batch of one with a single tap has no copy that could hide an inference-mode tensor."""
    target = tiny_target("qwen3", layer_ids=(1,))
    features = target.features(IDS[:1], LENGTHS[:1])
    embeds = target.embed(IDS[:1, :6]).unsqueeze(1)
    assert not features.is_inference()
    assert not features.requires_grad
    drafter = tiny_drafter(drafter_config(target_layer_ids=(1,)))
    hidden = drafter(features, embeds, torch.tensor([[4]]), torch.tensor([[True]]))
    (target.logits(torch.zeros(1, WIDTH)).sum() + hidden.square().sum()).backward()
    assert drafter.fc.weight.grad is not None
    assert all(parameter.grad is None for parameter in target.model.parameters())


@families
def test_embedding_is_what_the_first_layer_receives(family: str) -> None:
    target = tiny_target(family)
    received: list[torch.Tensor] = []
    target.model.get_decoder().layers[0].register_forward_pre_hook(
        lambda _module, args, kwargs: received.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    target.features(IDS, LENGTHS)
    assert torch.equal(target.embed(IDS), received[0])


def test_scaled_embeddings_are_not_the_bare_weight() -> None:
    target = tiny_target("gemma3")
    bare = target.model.get_input_embeddings().weight[IDS]
    torch.testing.assert_close(target.embed(IDS), bare * WIDTH**0.5, rtol=1e-3, atol=1e-3)


@families
def test_cached_forward_gives_the_same_logits_and_taps_as_one_forward(family: str) -> None:
    target = tiny_target(family)
    with torch.no_grad():
        wanted = target.model(input_ids=IDS[:1], use_cache=False).logits
    cache, logits, taps = target.new_cache(), [], []
    for first, last in [(0, 3), (3, 4), (4, 8)]:
        step_logits, step_taps = target.forward_cached(IDS[:1, first:last], cache)
        logits.append(step_logits)
        taps.append(step_taps)
        assert cache.length_tokens == last
    torch.testing.assert_close(torch.cat(logits, 1), wanted, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(torch.cat(taps, 1), target.features(IDS[:1], LENGTHS[:1]), atol=2e-3, rtol=2e-3)


def test_head_on_the_last_position_only_gives_the_last_logits() -> None:
    target = tiny_target("llama")
    everything, taps = target.forward_cached(IDS[:1], target.new_cache())
    last, same_taps = target.forward_cached_last(IDS[:1], target.new_cache())
    torch.testing.assert_close(last, everything[:, -1])
    assert torch.equal(taps, same_taps)
    torch.testing.assert_close(target.model.lm_head.weight, target.head_weight)


def test_threads_may_share_one_target() -> None:
    target = tiny_target("qwen3")
    batches = [torch.randint(61, (1, 8), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    wanted = [target.features(batch, LENGTHS[:1]) for batch in batches]
    found: dict[int, list[torch.Tensor]] = {}

    def work(index: int) -> None:
        found[index] = [target.features(batches[index], LENGTHS[:1]) for _ in range(10)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(features, wanted[index]) for index in range(4) for features in found[index])


def test_probe_refuses_a_model_whose_layers_lie_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    original = LayerTaps.__init__

    def off_by_one(self: LayerTaps, layers: Any, layer_ids: Any) -> None:
        original(self, list(layers)[1:], layer_ids)

    monkeypatch.setattr(LayerTaps, "__init__", off_by_one)
    with pytest.raises(TargetError, match=r"tap 0 is not hidden_states\[1\]"):
        tiny_target("qwen3")


@pytest.mark.parametrize("layer_ids", [(), (1, 1), (2, 0), (-1, 0), (0, 3), (0, 9)])
def test_layer_ids_that_do_not_fit_are_refused(layer_ids: tuple[int, ...]) -> None:
    with pytest.raises(TargetError, match="do not fit a target with 4 layers"):
        tiny_target("qwen3", layer_ids=layer_ids)


def test_a_head_with_a_bias_is_refused() -> None:
    model = tiny_model("llama")
    model.lm_head = nn.Linear(WIDTH, 61, bias=True)
    with pytest.raises(TargetError, match="no output head without bias"):
        Target(model, info=info_of(model), target_layer_ids=(0,))


def test_a_head_of_another_size_than_the_config_says_is_refused() -> None:
    model = tiny_model("llama")
    info = info_of(model)
    model.lm_head = nn.Linear(WIDTH, 64, bias=False)
    with pytest.raises(TargetError, match=r"head of shape \(64, 32\)"):
        Target(model, info=info, target_layer_ids=(0,))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_model("qwen3").save_pretrained(folder)
    return folder


def test_loading_a_folder_gives_the_same_features_frozen_and_in_float32(saved: Path) -> None:
    target = load_target(TargetConfig(path=str(saved), mask_token_id=60), target_layer_ids=(0, 1), device=CPU)
    assert torch.equal(target.features(IDS, LENGTHS), tiny_target("qwen3").features(IDS, LENGTHS))
    assert target.head_weight.dtype == torch.float32
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert (target.device, target.target_layer_ids) == (CPU, (0, 1))
    assert target.info.hidden_size == WIDTH


def test_dtype_of_the_config_is_obeyed(saved: Path) -> None:
    config = TargetConfig(path=str(saved), mask_token_id=60, dtype="bfloat16")
    target = load_target(config, target_layer_ids=(0, 1), device=CPU)
    assert target.features(IDS, LENGTHS).dtype == torch.bfloat16


def test_a_missing_tensor_is_refused_instead_of_filled_at_random(saved: Path, tmp_path: Path) -> None:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"lacks 1 tensors, e\.g\. model\.layers\.2\.mlp\.up_proj\.weight"):
        load_target(TargetConfig(path=str(tmp_path), mask_token_id=60), target_layer_ids=(0,), device=CPU)


def test_a_multimodal_checkpoint_gives_its_text_model(tmp_path: Path) -> None:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": WIDTH, "patch_size": 4}
    specials = {"image_token_id": 58, "video_token_id": 57, "vision_start_token_id": 56, "vision_end_token_id": 55}
    config = transformers.Qwen3_5Config(text_config=FAMILIES["qwen3_5"][1], vision_config=vision, **specials)
    torch.manual_seed(0)
    whole = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path)
    target = load_target(TargetConfig(path=str(tmp_path), mask_token_id=60), target_layer_ids=(0, 2), device=CPU)
    ids = torch.tensor([[5, 9, 2, 33, 17, 8]])
    with torch.no_grad():
        states = whole.model.language_model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    assert torch.equal(target.features(ids, torch.tensor([6])), torch.cat((states[1], states[3]), dim=-1))
    assert torch.equal(target.head_weight, whole.get_output_embeddings().weight)
    assert (target.info.hidden_size, target.info.num_hidden_layers) == (WIDTH, 4)


def test_weights_that_do_not_belong_to_the_config_are_refused(saved: Path, tmp_path: Path) -> None:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    text = (tmp_path / "config.json").read_text().replace('"intermediate_size": 48', '"intermediate_size": 40')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(TargetError, match="cannot be loaded"):
        load_target(TargetConfig(path=str(tmp_path), mask_token_id=60), target_layer_ids=(0,), device=CPU)


def test_the_multimodal_wrapper_itself_is_a_target_too() -> None:
    """Its decoder and head lie under other names, and it keeps positions of its own between calls."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": WIDTH, "patch_size": 4}
    specials = {"image_token_id": 58, "video_token_id": 57, "vision_start_token_id": 56, "vision_end_token_id": 55}
    config = transformers.Qwen3_5Config(text_config=FAMILIES["qwen3_5"][1], vision_config=vision, **specials)
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    target = Target(model, info=info_of(model), target_layer_ids=(0, 2))
    assert target.has_recurrent_state and target.replays_mixers
    for prompts in ([[5, 9, 2, 33]], [[5, 9], [1, 2, 3, 4, 6]]):
        found = target.prefill(prompts, with_taps=True)
        for row, prompt in enumerate(prompts):
            with torch.no_grad():
                wanted = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(found.logits[row], wanted, atol=1e-4, rtol=1e-4)
            alone = target.features(torch.tensor([prompt]), torch.tensor([len(prompt)]))[0]
            torch.testing.assert_close(found.taps[row, : len(prompt)], alone, atol=1e-4, rtol=1e-4)
            assert torch.equal(found.taps[row, len(prompt) :], torch.zeros_like(found.taps[row, len(prompt) :]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5", "qwen3_moe", "lfm2"])
def test_half_precision_targets_are_probed_tapped_and_rolled_back(family: str, dtype: str) -> None:
    model = tiny_model(family).to(getattr(torch, dtype))
    target = Target(model, info=info_of(model), target_layer_ids=(0, 1))
    assert target.features(IDS, LENGTHS).dtype == model.dtype
    assert target.logit_rule.scale == 1.0
    cache = target.prefill([[5, 9, 2, 33], [4, 4]], with_taps=False).cache
    target.logits_cached(IDS[:, :4], cache)
    target.keep(cache, [1, 3])
    assert cache.row_lengths == [5, 5]
    assert torch.isfinite(target.logits_cached(IDS[:, :2], cache)).all()


def test_a_padded_vocabulary_is_the_heads_and_the_embeddings() -> None:
    """The head has more rows than the tokenizer has tokens: all of them are kept, for the engines share it as it is."""
    target = tiny_target("llama")
    model = target.model
    model.resize_token_embeddings(64)
    padded = Target(model, info=info_of(model), target_layer_ids=(0, 1))
    assert padded.info.vocab_size == 64 and padded.head_weight.shape == (64, WIDTH)
    assert padded.embed(torch.tensor([[63]])).shape == (1, 1, WIDTH)


def test_a_gguf_file_is_not_mistaken_for_a_hub_name(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"GGUF file .*model\.gguf does not exist"):
        load_target(TargetConfig(path=str(tmp_path / "model.gguf"), mask_token_id=60), target_layer_ids=(0,), device=CPU)


def test_a_model_without_a_list_of_layers_is_refused() -> None:
    model = tiny_model("llama")
    info = info_of(model)
    model.model.layers = nn.Identity()
    with pytest.raises(TargetError, match="the decoder layers of"):
        Target(model, info=info, target_layer_ids=(0,))
