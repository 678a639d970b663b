"""The drafter form of transformers' own DFlash generation (`GenerationConfig(speculation_type="dflash")`). Pure; no files.

Its reference drafter (`models/muse_glimmer_assistant`, transformers 5.24) has this drafter's very layers, so an export loads
there with `AutoModel.from_pretrained` and serves as `assistant_model=`: no code of ours is needed to run it.
Invariants: the context projection's two tensors are named `encoder.*`; taps count decoder layers from 0 as we do; there the
window is inclusive (a query at q sees keys from q-window on), so ours is written less one.
Hard decision: its sliding layers are bidirectional inside a block and cannot be told otherwise. A drafter trained with causal
sliding layers is refused: it would draft, and be accepted less, without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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

ARCHITECTURE = "MuseGlimmerAssistantModel"
MODEL_TYPE = "muse_glimmer_assistant"
TENSOR_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
"""Our names of tensors that this layout calls otherwise."""


def transformers_config(description: DrafterDescription, *, dtype: DtypeName) -> dict[str, Any]:
    """The `config.json` of a drafter for transformers' DFlash generation.

    Args:
        description: the drafter and its target.
        dtype: of the stored weights.

    Returns:
        JSON-able mapping.

    Raises:
        DrafterError: causal sliding layers, a window shorter than a block, or another width than the target's.
    """
    config = description.config
    _refuse_inexpressible(description)
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        **{name: getattr(config, name) for name in SHAPE_KEYS},
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "bos_token_id": None,
        "dtype": dtype,
        "eos_token_id": None,
        "hidden_act": "silu",
        "initializer_range": config.initializer_range,
        "layer_types": list(config.resolved_layer_types),
        "mask_token_id": description.mask_token_id,
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "target_layer_ids": list(config.target_layer_ids),
        # Keys of our own; the library keeps unknown keys and reads none of these.
        "num_target_layers": description.num_target_layers,
        "sliding_causal": config.sliding_causal,
        "vocab_size": description.vocab_size,
    }
    # The library's default would stand in for a missing window; without sliding layers it is never read.
    raw["sliding_window"] = config.max_position_embeddings if config.sliding_window is None else config.sliding_window - 1
    return raw


def read_transformers(raw: Mapping[str, Any], *, origin: str) -> DrafterDescription:
    """The description in a `config.json` of transformers' DFlash drafter.

    Args:
        raw: parsed JSON.
        origin: file name, for errors.

    Raises:
        DrafterError: a needed key is missing, or a value asks for something that the drafter does not do.
    """
    types = layer_types_of(raw, origin, absent="sliding_attention")  # the library's own default
    refuse_unsupported(unsupported_decoder(raw, origin) | {"model_type": raw.get("model_type") != MODEL_TYPE}, origin)
    sliding = "sliding_attention" in types
    config = read_shape(
        raw,
        origin=origin,
        layer_types=tuple(types),
        rope_theta=rope_theta_of(raw, origin),
        block_size=required(raw, "block_size", int, origin),
        target_layer_ids=integers(raw, "target_layer_ids", origin),
        sliding_window=required(raw, "sliding_window", int, origin) + 1 if sliding else None,
        sliding_causal=False if sliding else flag(raw, "sliding_causal", origin, absent=True),
    )
    description = DrafterDescription(
        config=config,
        mask_token_id=required(raw, "mask_token_id", int, origin),
        vocab_size=required(raw, "vocab_size", int, origin),
        num_target_layers=optional(raw, "num_target_layers", int, origin),
        target_hidden_size=config.hidden_size,
        target_name=None,
        target_architectures=(),
    )
    check_mask_token(description.mask_token_id, description.vocab_size, origin)
    check_layer_ids(config.target_layer_ids, description.num_target_layers, origin)
    return description


def _refuse_inexpressible(description: DrafterDescription) -> None:
    config = description.config
    sliding = "sliding_attention" in config.resolved_layer_types
    problem = None
    if description.target_hidden_size != config.hidden_size:
        problem = f"a target {description.target_hidden_size} wide under a drafter {config.hidden_size} wide"
    elif sliding and config.sliding_causal:
        problem = "sliding layers that are causal inside a block (its own look both ways)"
    elif sliding and (config.sliding_window or 0) < config.block_size:
        problem = f"a window of {config.sliding_window} under a block of {config.block_size} (its own cuts the block as well)"
    if problem is not None:
        raise DrafterError(
            f"transformers' DFlash drafter cannot express {problem}",
            remedy="export another layout, or train with drafter.sliding_causal=false and a window of at least a block",
        )
