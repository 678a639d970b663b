"""Turns a Llama-architecture GGUF file into a Hugging Face folder that loads like any other target.

Invariant: the folder appears whole or not at all, every tensor of the file is used exactly once, and each is the
dequantized fp32 value: `d * q + m` of a 4-bit block needs more mantissa than bf16 has, so a smaller dtype would be another model.
The hard decision is the rotary order: the format stores the rows of q_proj and k_proj with the two halves of each head
interleaved, Hugging Face rotates halves; undoing that permutation is what makes the logits right (forgetting it raises nothing).
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from transformers import GenerationConfig, LlamaConfig

from dflash.errors import TargetError
from dflash.model.gguf_tokenizer import gguf_tokenizer, required, token_id

__all__ = ["convert_once", "gguf_to_hf"]

logger = logging.getLogger(__name__)

DOWNLOAD_AGAIN = "download it again and compare its SHA-256"

FloatArray = npt.NDArray[np.float32]

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_to_hf(gguf_file: Path, out_dir: Path) -> None:
    """Write a Hugging Face folder (config, fp32 safetensors, tokenizer with chat template) from a GGUF file.

    Args:
        gguf_file: Llama architecture, byte-level BPE vocabulary, any tensor type that the `gguf` package dequantizes.
        out_dir: must not exist; its parent must.

    Raises:
        TargetError: the file is missing, damaged or of another architecture, or the folder exists.
    """
    if out_dir.exists():
        raise TargetError(f"{out_dir} exists already", remedy="remove it or choose another folder")
    reader = _open(gguf_file)
    metadata = _metadata(reader, gguf_file)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = _llama_config(metadata, tied=tied, origin=gguf_file)
    tokenizer = gguf_tokenizer(metadata, origin=gguf_file)
    weights = _weights(reader, config, gguf_file)
    building = Path(tempfile.mkdtemp(dir=out_dir.parent, prefix=f".{out_dir.name}."))
    try:
        building.chmod(0o755)  # mkdtemp makes folders private; a target is for every reader
        config.save_pretrained(building)
        _generation_config(config).save_pretrained(building)
        tokenizer.save_pretrained(building)
        weights_file = building / "model.safetensors"
        save_file(weights, weights_file, metadata={"format": "pt"})
        weights_file.chmod(0o644)
        building.replace(out_dir)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    parameters = sum(weight.size for weight in weights.values())
    logger.info("%s: %d tensors, %.1f M parameters -> %s", gguf_file.name, len(weights), parameters / 1e6, out_dir)


def convert_once(gguf_file: Path, folder: Path) -> None:
    """Convert a GGUF file into a cache folder that nobody has made yet; whoever comes first wins.

    Args:
        gguf_file: see `gguf_to_hf`.
        folder: made with its parents; a folder that is there is complete and left alone.

    Raises:
        TargetError: the file cannot be converted, or the folder not be written.
    """
    if folder.is_dir():
        return
    logger.info("converting %s once into %s", gguf_file, folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        gguf_to_hf(gguf_file, folder)
    except TargetError:
        if not folder.is_dir():
            raise
    except OSError as error:
        if not folder.is_dir():  # else another process was faster
            raise TargetError(
                f"{gguf_file} cannot be converted into {folder}: {error.strerror}",
                remedy="make the cache folder writable, or name another one in XDG_CACHE_HOME",
            ) from error
    except Exception as error:  # of any kind: the values, like the header, are believed until something does not work
        raise TargetError(f"{gguf_file} cannot be converted: {type(error).__name__}: {error}", remedy=DOWNLOAD_AGAIN) from error


def undo_rotary_permutation(weight: FloatArray, *, heads: int) -> FloatArray:
    """Rows of a q or k projection from the format's interleaved order to Hugging Face's two halves a head.

    Args:
        weight: [heads * head_dim, D_in]; row 2i of a head is its i-th lower row, row 2i+1 its i-th upper one.
        heads: query or key/value heads.

    Returns:
        [heads * head_dim, D_in].
    """
    rows, width = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, width)


def _open(gguf_file: Path) -> Any:
    if not gguf_file.is_file():
        raise TargetError(f"GGUF file {gguf_file} does not exist", remedy="check the path")
    import gguf  # only who converts a file needs the package

    class BoundedReader(gguf.GGUFReader):  # type: ignore[misc]
        """A reader that stops at the file's end: the library's own counts on through a header that promises more."""

        def _get(self, offset: int, dtype: Any, count: int = 1, **order: Any) -> Any:
            found = super()._get(offset, dtype, count, **order)
            if len(found) < count:
                raise TargetError(
                    f"{gguf_file} is not a complete GGUF file: its header names {count} values at byte {offset}, it ends before",
                    remedy=DOWNLOAD_AGAIN,
                )
            return found

    try:
        return BoundedReader(gguf_file)
    except TargetError:
        raise
    except Exception as error:  # of any kind: the library believes the header until something does not work
        raise TargetError(f"{gguf_file} is not a complete GGUF file: {error}", remedy=DOWNLOAD_AGAIN) from error


def _metadata(reader: Any, origin: Path) -> dict[str, Any]:
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise TargetError(
            f"{origin} holds the architecture {architecture!r}, only 'llama' is converted",
            remedy="use the model's Hugging Face folder instead",
        )
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise TargetError(f"{origin} scales RoPE ({scaling}), which is not converted", remedy="use the Hugging Face folder instead")
    return metadata


def _llama_config(metadata: Mapping[str, Any], *, tied: bool, origin: Path) -> LlamaConfig:
    def need(name: str) -> Any:
        return required(metadata, f"llama.{name}", origin)

    heads = need("attention.head_count")
    head_dim = metadata.get("llama.attention.key_length", need("embedding_length") // heads)
    if metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise TargetError(
            f"{origin} rotates {metadata['llama.rope.dimension_count']} of {head_dim} dimensions a head; Llama rotates all",
            remedy="use the model's Hugging Face folder instead",
        )
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(required(metadata, "tokenizer.ggml.tokens", origin)),
        hidden_size=need("embedding_length"),
        intermediate_size=need("feed_forward_length"),
        num_hidden_layers=need("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=metadata.get("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=need("context_length"),
        rms_norm_eps=_shortest(need("attention.layer_norm_rms_epsilon")),
        rope_parameters={"rope_type": "default", "rope_theta": _shortest(metadata.get("llama.rope.freq_base", 10000.0))},
        tie_word_embeddings=tied,
        bos_token_id=token_id(metadata, "bos"),
        eos_token_id=token_id(metadata, "eos"),
        pad_token_id=token_id(metadata, "padding"),
        dtype="float32",
    )


def _shortest(value: float) -> float:
    """The shortest decimal of a number that was stored in single precision: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _generation_config(config: LlamaConfig) -> GenerationConfig:
    return GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        do_sample=False,
    )


def _weights(reader: Any, config: LlamaConfig, origin: Path) -> dict[str, FloatArray]:
    """Every tensor under its Hugging Face name, checked against the names and shapes that the configuration implies."""
    expected = _expected_shapes(config)
    present = {tensor.name: tensor for tensor in reader.tensors}
    if set(present) != set(expected):
        missing, unknown = sorted(set(expected) - set(present)), sorted(set(present) - set(expected))
        raise TargetError(
            f"{origin} does not hold a plain Llama: missing tensors {missing[:4]}, unknown tensors {unknown[:4]}",
            remedy="use the model's Hugging Face folder instead",
        )
    weights: dict[str, FloatArray] = {}
    for name, (hf_name, shape) in expected.items():
        array = _dequantized(present[name], origin)
        if array.shape != shape:
            raise TargetError(f"{origin}: {name} has the shape {array.shape}, expected {shape}", remedy="download the file again")
        if ".attn_q." in name:
            array = undo_rotary_permutation(array, heads=config.num_attention_heads)
        elif ".attn_k." in name:
            array = undo_rotary_permutation(array, heads=config.num_key_value_heads)
        weights[hf_name] = array
    return weights


def _dequantized(tensor: Any, origin: Path) -> FloatArray:
    import gguf

    try:
        return np.ascontiguousarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    except NotImplementedError as error:
        raise TargetError(
            f"{origin}: {tensor.name} has the type {tensor.tensor_type.name}, which the gguf package cannot dequantize",
            remedy="use a Q4_1, Q8_0, F16 or F32 file of the model",
        ) from error


def _expected_shapes(config: LlamaConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """GGUF tensor name -> (Hugging Face name, shape [out, in])."""
    hidden, ff, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    q_rows, kv_rows = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    layer_shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn_q": (q_rows, hidden),
        "attn_k": (kv_rows, hidden),
        "attn_v": (kv_rows, hidden),
        "attn_output": (hidden, q_rows),
        "ffn_norm": (hidden,),
        "ffn_gate": (ff, hidden),
        "ffn_up": (ff, hidden),
        "ffn_down": (hidden, ff),
    }
    top_shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocab, hidden), "output_norm": (hidden,)}
    if not config.tie_word_embeddings:
        top_shapes["output"] = (vocab, hidden)
    shapes = {f"{name}.weight": (f"{_TOP_NAMES[name]}.weight", shape) for name, shape in top_shapes.items()}
    for layer in range(config.num_hidden_layers):
        for name, shape in layer_shapes.items():
            shapes[f"blk.{layer}.{name}.weight"] = (f"model.layers.{layer}.{_LAYER_NAMES[name]}.weight", shape)
    return shapes
