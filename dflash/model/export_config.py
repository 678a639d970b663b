"""The published drafter's `config.json`: written from our configuration, and read back into it. Pure; no files.

Invariant: reading what was written gives the same `DrafterConfig`. Serving engines fill missing keys silently (a mask token
that falls back to pad, a block size of their own), so everything that changes a number is written, and on reading a missing
mask token or layer list is an error.
Hard decision: in-block causality. Engines read `dflash_config.causal` as a switch for *all* layers, and without it take
sliding layers as causal and full ones as not. So `causal` is written only where one value is true of all layers; the mixed
case leaves it out, which means the same to them, and our own `sliding_causal` records the choice in every case.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash.config import DrafterConfig
from dflash.errors import DrafterError

ARCHITECTURE = "DFlashDraftModel"
INITIALIZER_RANGE = 0.02  # of Qwen3; an imported drafter is never initialised, the key only completes the configuration

_SAME_NAME = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rope_theta", "rms_norm_eps", "max_position_embeddings",
)  # fmt: skip


def hf_drafter_config(
    config: DrafterConfig, *, mask_token_id: int, vocab_size: int, num_target_layers: int, dtype: str
) -> dict[str, Any]:
    """The `config.json` of a drafter in the published layout.

    Args:
        config: the drafter's shape.
        mask_token_id: token that fills the drafted slots.
        vocab_size: the target's padded vocabulary.
        num_target_layers: decoder layers of the target.
        dtype: `bfloat16` or `float32`, of the stored weights.

    Returns:
        JSON-able mapping.
    """
    types = config.resolved_layer_types
    sliding = "sliding_attention" in types
    drafting: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "sliding_causal": config.sliding_causal,
    }
    causal = {config.sliding_causal if kind == "sliding_attention" else False for kind in types}
    if len(causal) == 1:
        drafting["causal"] = causal.pop()
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        **{name: getattr(config, name) for name in _SAME_NAME},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "dflash_config": drafting,
        "dtype": dtype,
        "hidden_act": "silu",
        "initializer_range": config.initializer_range,
        "layer_types": list(types),
        "num_target_layers": num_target_layers,
        "rope_scaling": None,
        "sliding_window": config.sliding_window if sliding else None,
        "tie_word_embeddings": False,
        "use_sliding_window": sliding,
        "vocab_size": vocab_size,
    }


def drafter_config_of(raw: Mapping[str, Any], *, origin: str) -> DrafterConfig:
    """The drafter configuration that a published `config.json` describes.

    Args:
        raw: parsed JSON.
        origin: file name, for errors.

    Raises:
        DrafterError: a needed key is missing, or a value asks for something that the drafter does not do.
    """
    drafting = required(raw, "dflash_config", dict, origin)
    types = raw.get("layer_types") or ["full_attention"] * required(raw, "num_hidden_layers", int, origin)
    _refuse_unsupported(raw, drafting, types, origin)
    block_size = raw.get("block_size", drafting.get("block_size"))
    if block_size is None or drafting.get("block_size", block_size) != block_size:
        raise DrafterError(
            f"{origin} names no single block_size (top level {raw.get('block_size')}, dflash_config {drafting.get('block_size')})",
            remedy="write the trained block size into both places",
        )
    try:
        return DrafterConfig(
            **{name: required(raw, name, int | float, origin) for name in _SAME_NAME if name != "rope_theta"},
            rope_theta=_rope_theta(raw, origin),
            block_size=block_size,
            target_layer_ids=tuple(required(drafting, "target_layer_ids", list, origin)),
            layer_types=tuple(types),
            sliding_window=raw.get("sliding_window"),
            sliding_causal=drafting.get("sliding_causal", drafting.get("causal", True)),
            initializer_range=raw.get("initializer_range", INITIALIZER_RANGE),
        )
    except ValueError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:] if "further information" not in line]
        raise DrafterError(
            f"{origin} describes no valid drafter: {' '.join(lines)}", remedy="correct the exported config"
        ) from error


def required(raw: Mapping[str, Any], key: str, kind: Any, origin: str) -> Any:
    """A value that must be there and of the given type (booleans are no numbers).

    Raises:
        DrafterError: it is missing or of another type.
    """
    value = raw.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise DrafterError(
            f"{origin} lacks {key!r}, or its value {value!r} is of the wrong type",
            remedy="export the drafter again; engines would silently fall back to a default of their own",
        )
    return value


def _rope_theta(raw: Mapping[str, Any], origin: str) -> float:
    parameters = raw.get("rope_parameters") or raw
    return float(required(parameters, "rope_theta", int | float, origin))


def _refuse_unsupported(raw: Mapping[str, Any], drafting: Mapping[str, Any], types: list[str], origin: str) -> None:
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    found = {
        "attention_bias": raw.get("attention_bias", False),
        "rope type": scaling.get("rope_type", scaling.get("type", "default")) != "default",
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "causal full-attention layers": bool(drafting.get("causal")) and "full_attention" in types,
        "architectures": ARCHITECTURE not in raw.get("architectures", [ARCHITECTURE]),
    }
    refused = [name for name, present in found.items() if present]
    if refused:
        raise DrafterError(
            f"{origin} asks for what this drafter does not do: {', '.join(refused)}",
            remedy="use a drafter in the published layout (plain RoPE, silu, no biases, bidirectional full layers)",
        )
