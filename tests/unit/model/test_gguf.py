"""GGUF to Hugging Face: the same model, the file's own tokenizer, one clear error for anything else."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from dflash.errors import TargetError
from dflash.model.gguf import gguf_to_hf, undo_rotary_permutation
from tests.support import tiny_gguf

Q4_1, Q8_0, F16 = GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0, GGMLQuantizationType.F16
MIXED = {
    "token_embd": Q8_0,
    "attn_q": Q4_1,
    "attn_k": Q4_1,
    "attn_v": F16,
    "attn_output": Q4_1,
    "ffn_gate": Q4_1,
    "ffn_up": Q8_0,
    "ffn_down": Q4_1,
}


def truth(weights: tiny_gguf.Weights, *, tied: bool) -> LlamaForCausalLM:
    """The model that the weights were drawn for, built without any GGUF code."""
    config = LlamaConfig(
        vocab_size=len(tiny_gguf.vocabulary()),
        hidden_size=tiny_gguf.HIDDEN,
        intermediate_size=tiny_gguf.FF,
        num_hidden_layers=tiny_gguf.LAYERS,
        num_attention_heads=tiny_gguf.HEADS,
        num_key_value_heads=tiny_gguf.KV_HEADS,
        head_dim=tiny_gguf.HEAD_DIM,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()}, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if tied else [])
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_full_precision_file_gives_the_original_logits(tmp_path: Path, tied: bool) -> None:
    weights = tiny_gguf.random_weights(seed=1, tied=tied)
    gguf_to_hf(tiny_gguf.write_gguf(tmp_path / "tiny.gguf", weights, types={}), tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    ids = torch.randint(4, 200, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours, original = model(ids).logits, truth(weights, tied=tied)(ids).logits
    assert model.config.tie_word_embeddings is tied
    torch.testing.assert_close(ours, original, rtol=0, atol=0)


def test_quantized_file_equals_the_loader_of_transformers(tmp_path: Path) -> None:
    weights = tiny_gguf.random_weights(seed=2, tied=True)
    file = tiny_gguf.write_gguf(tmp_path / "tiny.gguf", weights, types=MIXED)
    gguf_to_hf(file, tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    reference = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    ours = model.state_dict()
    assert set(reference) == set(weights)
    for name, tensor in reference.items():
        assert torch.equal(ours[name], tensor), name
        step = np.abs(weights[name]).max() / (5 if "proj" in name else 50)
        assert np.abs(tensor.numpy() - weights[name]).max() < step, "the loader itself is far from the original weights"
    assert ours["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float32


def test_folder_is_complete_and_readable_by_all(tmp_path: Path) -> None:
    weights = tiny_gguf.random_weights(seed=3, tied=True)
    gguf_to_hf(tiny_gguf.write_gguf(tmp_path / "tiny.gguf", weights, types=MIXED), tmp_path / "hf")
    names = {file.name for file in (tmp_path / "hf").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    for file in [tmp_path / "hf", *(tmp_path / "hf").iterdir()]:
        assert file.stat().st_mode & stat.S_IROTH, file
    assert sorted(file.name for file in tmp_path.iterdir()) == ["hf", "tiny.gguf"], "nothing else is left behind"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)
    assert model.config.rms_norm_eps == 1e-5


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The converted tokenizer for two ways of cutting text and for a file that asks for a leading bos token."""
    folder = tmp_path_factory.mktemp("tokenizers")
    weights = tiny_gguf.random_weights(seed=4, tied=True)
    made = {}
    for name, cutting, fields in [
        ("smollm", "smollm", {}),
        ("gpt-2", "gpt-2", {}),
        ("bos", "smollm", {"tokenizer.ggml.add_bos_token": True}),
    ]:
        file = tiny_gguf.write_gguf(folder / f"{name}.gguf", weights, types={}, cutting=cutting, fields=fields)
        gguf_to_hf(file, folder / name)
        made[name] = AutoTokenizer.from_pretrained(folder / name)
    return made


@given(text=st.text(max_size=40))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_text_survives_a_round_trip(tokenizers, text: str) -> None:  # type: ignore[no-untyped-def]
    tokenizer = tokenizers["smollm"]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_digits_stand_alone_only_where_the_file_says_so(tokenizers) -> None:  # type: ignore[no-untyped-def]
    vocabulary = tiny_gguf.vocabulary()

    def pieces(name: str) -> list[str]:
        return [vocabulary[token] for token in tokenizers[name].encode("a  12", add_special_tokens=False)]

    assert pieces("smollm") == ["a", "ĠĠ", "1", "2"]
    assert pieces("gpt-2") == ["a", "Ġ", "Ġ", "1", "2"]


def test_special_tokens_and_template_are_the_files_own(tokenizers) -> None:  # type: ignore[no-untyped-def]
    tokenizer = tokenizers["smollm"]
    named = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id)
    assert named == (1, 2, 0, 2)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode("hello<|im_end|><repo_name>")
    assert ids == [tiny_gguf.vocabulary().index("hello"), 2, 3]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello"
    assert tokenizers["bos"].encode("hello") == [1, ids[0]]


@given(heads=st.integers(1, 5), half=st.integers(1, 6), width=st.integers(1, 3))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_undoing_the_permutation_inverts_its_definition(heads: int, half: int, width: int) -> None:
    weight = np.arange(heads * 2 * half * width, dtype=np.float32).reshape(heads * 2 * half, width)
    stored = tiny_gguf.interleave_head_rows(weight, heads)
    np.testing.assert_array_equal(undo_rotary_permutation(stored, heads=heads), weight)


def refusal(tmp_path: Path, file: Path) -> TargetError:
    """Convert, expect a refusal, and assert that nothing was written."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(TargetError) as caught:
        gguf_to_hf(file, tmp_path / "hf")
    assert sorted(tmp_path.iterdir()) == before
    return caught.value


@pytest.mark.parametrize(
    ("fields", "cutting", "named"),
    [
        ({}, "a-rule-of-tomorrow", "a-rule-of-tomorrow"),
        ({"llama.rope.scaling.type": "yarn"}, "smollm", "yarn"),
        ({"llama.attention.key_length": 32}, "smollm", "16 of 32"),
    ],
)
def test_unknown_properties_are_refused_by_name(tmp_path: Path, fields: dict[str, object], cutting: str, named: str) -> None:
    weights = tiny_gguf.random_weights(seed=5, tied=True)
    file = tiny_gguf.write_gguf(tmp_path / "tiny.gguf", weights, types={}, cutting=cutting, fields=fields)
    error = refusal(tmp_path, file)
    assert named in error.what
    assert error.remedy


def test_missing_and_unknown_tensors_are_refused(tmp_path: Path) -> None:
    weights = tiny_gguf.random_weights(seed=6, tied=True)
    del weights["model.layers.1.mlp.up_proj.weight"]
    error = refusal(tmp_path, tiny_gguf.write_gguf(tmp_path / "tiny.gguf", weights, types={}))
    assert "blk.1.ffn_up.weight" in error.what


def test_truncated_file_other_files_and_missing_file_are_refused(tmp_path: Path) -> None:
    weights = tiny_gguf.random_weights(seed=7, tied=True)
    whole = tiny_gguf.write_gguf(tmp_path / "whole.gguf", weights, types=MIXED).read_bytes()
    for keep in (len(whole) - 1000, 2000, 30, 0):
        (tmp_path / "torn.gguf").write_bytes(whole[:keep])
        assert "torn.gguf" in refusal(tmp_path, tmp_path / "torn.gguf").what
    (tmp_path / "text.gguf").write_text("not a model at all, but long enough to be read as a header")
    assert "text.gguf" in refusal(tmp_path, tmp_path / "text.gguf").what
    assert "does not exist" in refusal(tmp_path, tmp_path / "absent.gguf").what


@pytest.mark.parametrize("name", ["tokenizer.ggml.tokens", "tokenizer.ggml.token_type"])
def test_a_header_that_promises_more_than_the_file_holds_ends_at_once(tmp_path: Path, name: str) -> None:
    file = tiny_gguf.write_gguf(tmp_path / "huge.gguf", tiny_gguf.random_weights(seed=7, tied=True), types=MIXED)
    whole = bytearray(file.read_bytes())
    count = whole.index(name.encode()) + len(name) + 8  # behind the types of the value and of its elements
    whole[count : count + 8] = (2**60).to_bytes(8, "little")
    for more in range(4):  # with one of them the file ends between two elements, not inside one
        file.write_bytes(whole + bytes(more))
        assert "huge.gguf" in refusal(tmp_path, file).what


def test_existing_folder_is_never_touched(tmp_path: Path) -> None:
    weights = tiny_gguf.random_weights(seed=8, tied=True)
    file = tiny_gguf.write_gguf(tmp_path / "tiny.gguf", weights, types={})
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine.txt").write_text("keep")
    assert "exists already" in refusal(tmp_path, file).what
    assert (tmp_path / "hf" / "mine.txt").read_text() == "keep"
