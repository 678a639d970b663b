"""The z-lab layout's `config.json`: written from a description, and read back into it. Pure; no files.

Invariant: reading what was written gives the same description. Serving engines fill missing keys silently (a mask token
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
from dflash.model.export_fields import (
    SHAPE_KEYS,
    DrafterDescription,
    DtypeName,
    check_layer_ids,
    check_mask_token,
    flag,
    integers,
    layer_types_of,
    optional,
    read_shape,
    refuse_unsupported,
    required,
    rope_theta_of,
    unsupported_decoder,
)

ARCHITECTURE = "DFlashDraftModel"
MODEL_TYPE = "qwen3"


def zlab_config(description: DrafterDescription, *, dtype: DtypeName) -> dict[str, Any]:
    """The `config.json` of a drafter in the z-lab layout.

    Args:
        description: the drafter and its target.
        dtype: of the stored weights.

    Returns:
        JSON-able mapping.

    Raises:
        DrafterError: the number of the target's layers is not known.
    """
    config = description.config
    if description.num_target_layers is None:
        raise DrafterError(
            "the number of the target's layers is not known, and this layout has to name it",
            remedy="give the target as well (--target FOLDER)",
        )
    types = config.resolved_layer_types
    sliding = "sliding_attention" in types
    drafting: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": description.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "sliding_causal": config.sliding_causal,
    }
    causal = causal_switch(config)
    if causal is not None:
        drafting["causal"] = causal
    raw = {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        **{name: getattr(config, name) for name in SHAPE_KEYS},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "dflash_config": drafting,
        "dtype": dtype,
        "hidden_act": "silu",
        "initializer_range": config.initializer_range,
        "layer_types": list(types),
        "num_target_layers": description.num_target_layers,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "sliding_window": config.sliding_window if sliding else None,
        "tie_word_embeddings": False,
        "use_sliding_window": sliding,
        "vocab_size": description.vocab_size,
    }
    if description.target_hidden_size != config.hidden_size:
        raw["target_hidden_size"] = description.target_hidden_size
    return raw


def read_zlab(raw: Mapping[str, Any], *, origin: str) -> DrafterDescription:
    """The description in a z-lab `config.json`.

    Args:
        raw: parsed JSON.
        origin: file name, for errors.

    Raises:
        DrafterError: a needed key is missing, two keys contradict each other, or a value asks for something that the
            drafter does not do.
    """
    drafting = required(raw, "dflash_config", dict, origin)
    types = layer_types_of(raw, origin, absent="full_attention")
    architectures = optional(raw, "architectures", list, origin)
    refuse_unsupported(
        unsupported_decoder(raw, origin)
        | {
            "causal full-attention layers": flag(drafting, "causal", origin, absent=False) and "full_attention" in types,
            "architectures": architectures is not None and ARCHITECTURE not in architectures,
        },
        origin,
    )
    config = read_shape(
        raw,
        origin=origin,
        rope_theta=rope_theta_of(raw, origin),
        layer_types=tuple(types),
        block_size=_block_size(raw, drafting, origin),
        target_layer_ids=integers(drafting, "target_layer_ids", origin),
        sliding_window=optional(raw, "sliding_window", int, origin),
        sliding_causal=_sliding_causal(drafting, types, origin),
    )
    description = DrafterDescription(
        config=config,
        mask_token_id=required(drafting, "mask_token_id", int, f"{origin}: dflash_config"),
        vocab_size=required(raw, "vocab_size", int, origin),
        num_target_layers=required(raw, "num_target_layers", int, origin),
        target_hidden_size=optional(raw, "target_hidden_size", int, origin) or config.hidden_size,
        target_name=None,
        target_architectures=(),
    )
    check_mask_token(description.mask_token_id, description.vocab_size, origin)
    check_layer_ids(config.target_layer_ids, description.num_target_layers, origin)
    return description


def causal_switch(config: DrafterConfig) -> bool | None:
    """What `dflash_config.causal` must say: the one value that is true of all layers, None where there is none."""
    causal = {config.sliding_causal if kind == "sliding_attention" else False for kind in config.resolved_layer_types}
    return causal.pop() if len(causal) == 1 else None


def _block_size(raw: Mapping[str, Any], drafting: Mapping[str, Any], origin: str) -> int:
    named = {value for place in (raw, drafting) if (value := optional(place, "block_size", int, origin)) is not None}
    if len(named) != 1:
        raise DrafterError(
            f"{origin} names no single block_size (top level {raw.get('block_size')}, dflash_config {drafting.get('block_size')})",
            remedy="write the trained block size into both places",
        )
    size: int = named.pop()
    return size


def _sliding_causal(drafting: Mapping[str, Any], types: list[str], origin: str) -> bool:
    own, switch = (drafting.get(key) for key in ("sliding_causal", "causal"))
    if "sliding_attention" in types and None not in (own, switch) and own != switch:
        raise DrafterError(
            f"{origin} says causal {switch} and sliding_causal {own} about the same sliding layers",
            remedy="write what the drafter was trained with into both, or leave `causal` out of a mixed drafter",
        )
    return flag(drafting, "causal" if own is None else "sliding_causal", origin, absent=True)
