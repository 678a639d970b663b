"""Writes tiny Llama GGUF files with known weights, so that a conversion can be compared with the truth."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize
from tokenizers.pre_tokenizers import ByteLevel

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FF = 64, 2, 4, 2, 16, 96
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>")
# The space run is a token of its own, so that the two ways of cutting "  1" give different ids.
MERGES = ("Ġ Ġ", "h e", "l l", "he ll", "hell o", "Ġ w")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
Weights = dict[str, npt.NDArray[np.float32]]


def vocabulary() -> list[str]:
    """Control tokens, the 256 byte symbols, then the products of the merges."""
    return [*CONTROL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


def random_weights(*, seed: int, tied: bool) -> Weights:
    """Random weights of the tiny Llama under Hugging Face names, in Hugging Face's row order."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> npt.NDArray[np.float32]:
        return rng.normal(0, 0.1, shape).astype(np.float32)

    vocab = len(vocabulary())
    weights: Weights = {"model.embed_tokens.weight": normal(vocab, HIDDEN), "model.norm.weight": 1 + normal(HIDDEN)}
    if not tied:
        weights["lm_head.weight"] = normal(vocab, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}input_layernorm.weight": 1 + normal(HIDDEN),
            f"{prefix}self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": normal(HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}post_attention_layernorm.weight": 1 + normal(HIDDEN),
            f"{prefix}mlp.gate_proj.weight": normal(FF, HIDDEN),
            f"{prefix}mlp.up_proj.weight": normal(FF, HIDDEN),
            f"{prefix}mlp.down_proj.weight": normal(HIDDEN, FF),
        }
    return weights


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{_GGUF_NAMES[stem]}.weight"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[inner]}.weight"


def interleave_head_rows(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """The format's row order, by the definition: row 2i of a head is row i, row 2i+1 is row i + head_dim/2."""
    out = np.empty_like(weight)
    dim = weight.shape[0] // heads
    for head in range(heads):
        for i in range(dim // 2):
            out[head * dim + 2 * i] = weight[head * dim + i]
            out[head * dim + 2 * i + 1] = weight[head * dim + i + dim // 2]
    return out


def write_gguf(
    path: Path,
    weights: Weights,
    *,
    types: Mapping[str, GGMLQuantizationType],
    cutting: str = "smollm",
    fields: Mapping[str, Any] | None = None,
) -> Path:
    """Write `weights` as a Llama GGUF; `types` maps a GGUF tensor name's last part to its type, F32 otherwise.

    `fields` are further metadata (`str`, `int` or `bool` values) under their full names.
    """
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_DIM)
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cutting)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in CONTROL else TokenType.NORMAL for token in tokens])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, value in (fields or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(name, value)
    for name, weight in weights.items():
        stored = weight
        if "q_proj" in name or "k_proj" in name:
            stored = interleave_head_rows(weight, HEADS if "q_proj" in name else KV_HEADS)
        kind = types.get(gguf_name(name).split(".")[-2], GGMLQuantizationType.F32)
        if kind == GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), stored)
        else:
            writer.add_tensor(gguf_name(name), quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
