"""The speculators layout's `config.json`: written from a description, and read back into it. Pure; no files.

Invariants: `aux_hidden_state_layer_ids` counts hidden states, so id l+1 is our tap l; the decoder's own keys live in
`transformer_layer_config`; the top level says whether sliding layers look ahead inside a block (`sliding_window_non_causal`).
Hard decision: only full vocabularies. A pruned draft vocabulary needs a head of its own, which this drafter does not have:
it is refused with its two sizes instead of being read as something else.
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

ARCHITECTURE = "DFlashDraftModel"
MODEL_TYPE = "dflash"
FORMAT_VERSION = "0.9.0"
"""Version of the layout that is written."""


def speculators_config(description: DrafterDescription, *, dtype: DtypeName) -> dict[str, Any]:
    """The `config.json` of a drafter in the speculators layout.

    Args:
        description: the drafter and its target.
        dtype: of the stored weights.

    Returns:
        JSON-able mapping.
    """
    config = description.config
    sliding = "sliding_attention" in config.resolved_layer_types
    decoder = {
        "model_type": "qwen3",
        **{name: getattr(config, name) for name in SHAPE_KEYS},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": config.initializer_range,
        "layer_types": list(config.resolved_layer_types),
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "sliding_window": config.sliding_window if sliding else None,
        "tie_word_embeddings": False,
        "use_sliding_window": sliding,
        "vocab_size": description.vocab_size,
    }
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "speculators_model_type": MODEL_TYPE,
        "speculators_version": FORMAT_VERSION,
        "speculators_config": {
            "algorithm": MODEL_TYPE,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": description.target_name,
                "architectures": list(description.target_architectures),
            },
        },
        "transformer_layer_config": decoder,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in config.target_layer_ids],
        "block_size": config.block_size,
        "draft_vocab_size": description.vocab_size,
        "mask_token_id": description.mask_token_id,
        "sliding_window_non_causal": not config.sliding_causal,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
    if description.num_target_layers is not None:  # a key of our own: no reader minds, and the way back needs no target
        raw["num_target_layers"] = description.num_target_layers
    if description.target_hidden_size != config.hidden_size:
        raw["target_hidden_size"] = description.target_hidden_size
    return raw


def read_speculators(raw: Mapping[str, Any], *, origin: str) -> DrafterDescription:
    """The description in a speculators `config.json`.

    Args:
        raw: parsed JSON.
        origin: file name, for errors.

    Raises:
        DrafterError: a needed key is missing, the vocabulary is pruned, or a value asks for something that the drafter
            does not do.
    """
    decoder = required(raw, "transformer_layer_config", dict, origin)
    refuse_unsupported(
        unsupported_decoder(decoder, origin)
        | {
            "speculators_model_type": raw.get("speculators_model_type") != MODEL_TYPE,
            "projector_type": raw.get("projector_type", MODEL_TYPE) != MODEL_TYPE,
            "labels shifted by one": flag(raw, "shift_label", origin, absent=False),
            "a draft at the anchor's own slot": flag(raw, "sample_from_anchor", origin, absent=False),
        },
        origin,
    )
    vocab_size = required(decoder, "vocab_size", int, origin)
    _refuse_pruned(raw, vocab_size, origin)
    config = read_shape(
        decoder,
        origin=origin,
        rope_theta=rope_theta_of(decoder, origin),
        layer_types=tuple(layer_types_of(decoder, origin, absent="full_attention")),
        block_size=required(raw, "block_size", int, origin),
        target_layer_ids=_taps(raw, origin),
        sliding_window=optional(decoder, "sliding_window", int, origin),
        sliding_causal=not flag(raw, "sliding_window_non_causal", origin, absent=False),
    )
    verifier = optional(optional(raw, "speculators_config", dict, origin) or {}, "verifier", dict, origin) or {}
    description = DrafterDescription(
        config=config,
        mask_token_id=required(raw, "mask_token_id", int, origin),
        vocab_size=vocab_size,
        num_target_layers=optional(raw, "num_target_layers", int, origin),
        target_hidden_size=optional(raw, "target_hidden_size", int, origin) or config.hidden_size,
        target_name=optional(verifier, "name_or_path", str, origin),
        target_architectures=tuple(optional(verifier, "architectures", list, origin) or ()),
    )
    check_mask_token(description.mask_token_id, vocab_size, origin)
    check_layer_ids(config.target_layer_ids, description.num_target_layers, origin)
    return description


def _taps(raw: Mapping[str, Any], origin: str) -> tuple[int, ...]:
    ids = integers(raw, "aux_hidden_state_layer_ids", origin)
    if any(number < 1 for number in ids):
        raise DrafterError(
            f"{origin} has aux_hidden_state_layer_ids {list(ids)}: hidden state 0 is the embedding, taps are 1 and above",
            remedy="correct the list; it counts hidden states, one more than decoder layers counted from 0",
        )
    return tuple(number - 1 for number in ids)


def _refuse_pruned(raw: Mapping[str, Any], vocab_size: int, origin: str) -> None:
    drafted = required(raw, "draft_vocab_size", int, origin)
    if drafted != vocab_size:
        raise DrafterError(
            f"{origin} drafts in a pruned vocabulary: draft_vocab_size {drafted} of the target's {vocab_size} (d2t / t2d maps)",
            remedy="use a drafter of the full vocabulary: this one drafts with the target's own head",
        )
