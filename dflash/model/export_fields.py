"""What every published layout says about a drafter, in one typed form, and the checks that all of them share. Pure; no files.

Invariant: inside, a tap `l` is the output of decoder layer l, 0-based, and a window W lets a query at position q see keys
from q-(W-1) on. Layouts count differently; they convert when they are read and written, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dflash.config import DrafterConfig
from dflash.errors import DrafterError

LayoutName = Literal["zlab", "speculators", "transformers"]
DtypeName = Literal["bfloat16", "float16", "float32"]

INITIALIZER_RANGE = 0.02  # of Qwen3; an imported drafter is never initialised, the key only completes the configuration

SHAPE_KEYS = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "max_position_embeddings",
)  # fmt: skip
"""Keys with the same name and meaning in all layouts and in our configuration."""


@dataclass(frozen=True, slots=True)
class DrafterDescription:
    """A drafter and the target that it belongs to, as a published folder describes them.

    Attributes:
        mask_token_id: token that fills the drafted slots.
        vocab_size: the target's padded vocabulary.
        num_target_layers: decoder layers of the target; None where the layout does not say.
        target_hidden_size: width of one tapped target layer.
        target_name: hub name or folder of the target; None where the layout does not say.
        target_architectures: class names of the target.
    """

    config: DrafterConfig
    mask_token_id: int
    vocab_size: int
    num_target_layers: int | None
    target_hidden_size: int
    target_name: str | None
    target_architectures: tuple[str, ...]


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


def optional(raw: Mapping[str, Any], key: str, kind: Any, origin: str) -> Any:
    """Like `required`, but None where the key is absent or null."""
    return None if raw.get(key) is None else required(raw, key, kind, origin)


def flag(raw: Mapping[str, Any], key: str, origin: str, *, absent: bool) -> bool:
    """A truth value, `absent` where the key is absent or null; a word or a number is no truth value.

    Raises:
        DrafterError: it is of another type.
    """
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise DrafterError(f"{origin} has {key!r} = {value!r}, which is neither true nor false", remedy="write true or false")
    return absent if value is None else value


def integers(raw: Mapping[str, Any], key: str, origin: str) -> tuple[int, ...]:
    """A list of integers that must be there.

    Raises:
        DrafterError: it is missing, or something else.
    """
    values = required(raw, key, list, origin)
    if any(not isinstance(value, int) or isinstance(value, bool) for value in values):
        raise DrafterError(f"{origin} has {key!r} = {values!r}, which is no list of integers", remedy="correct the list")
    return tuple(values)


def layer_types_of(raw: Mapping[str, Any], origin: str, *, absent: str) -> list[str]:
    """Attention type of each layer, all `absent` where the key is absent or null.

    Raises:
        DrafterError: it is no list of that length, or only `use_sliding_window` says that some layers slide.
    """
    types = optional(raw, "layer_types", list, origin)
    if types is None and raw.get("use_sliding_window"):
        raise DrafterError(
            f"{origin} slides (use_sliding_window) and has no layer_types that say which layers do",
            remedy="write layer_types, one entry a layer",
        )
    layers = required(raw, "num_hidden_layers", int, origin)
    if types is not None and len(types) != layers:
        raise DrafterError(f"{origin}: layer_types has {len(types)} entries for {layers} layers", remedy="write one entry a layer")
    return [absent] * layers if types is None else types


def rope_theta_of(raw: Mapping[str, Any], origin: str) -> float:
    """Base of the RoPE, from `rope_theta` or from the newer `rope_parameters`.

    Raises:
        DrafterError: neither names one, or they name different ones.
    """
    places = (raw, optional(raw, "rope_parameters", dict, origin) or {})
    named = {float(required(place, "rope_theta", int | float, origin)) for place in places if place.get("rope_theta") is not None}
    if len(named) > 1:
        raise DrafterError(f"{origin} names several rope_theta: {sorted(named)}", remedy="write the one that was trained with")
    return named.pop() if named else float(required(raw, "rope_theta", int | float, origin))


def refuse_unsupported(found: Mapping[str, object], origin: str) -> None:
    """Refuse features that this drafter does not have.

    Args:
        found: what is asked for; entries that are false are fine.
        origin: file name.

    Raises:
        DrafterError: names every entry that is true.
    """
    refused = [name for name, present in found.items() if present]
    if refused:
        raise DrafterError(
            f"{origin} asks for what this drafter does not do: {', '.join(refused)}",
            remedy="use a drafter with plain RoPE, silu, no biases and bidirectional full-attention layers",
        )


def unsupported_decoder(raw: Mapping[str, Any], origin: str) -> dict[str, object]:
    """Decoder features of a Qwen3-style configuration that the drafter lacks, by name.

    Raises:
        DrafterError: a value is of another type than it can have.
    """
    ropes = [optional(raw, key, dict, origin) or {} for key in ("rope_scaling", "rope_parameters")]
    kinds = [rope.get("rope_type", rope.get("type", "default")) for rope in ropes]
    shares = [place.get("partial_rotary_factor") for place in (raw, *ropes)]
    return {
        "attention_bias": flag(raw, "attention_bias", origin, absent=False),
        "rope type": any(kind != "default" for kind in kinds),
        "partial rotary": any(share not in (None, 1.0) for share in shares),
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "tied embeddings": flag(raw, "tie_word_embeddings", origin, absent=False),
    }


def read_shape(raw: Mapping[str, Any], *, origin: str, **decided: Any) -> DrafterConfig:
    """The drafter's configuration from a layout's decoder section.

    Args:
        raw: mapping with the shape keys.
        origin: file name, for errors.
        decided: what the layout spells in its own way (layer types, block size, taps, window, causality, RoPE base).

    Raises:
        DrafterError: a key is missing, or the values describe no drafter.
    """
    spread = optional(raw, "initializer_range", int | float, origin)
    try:
        return DrafterConfig(
            **{name: required(raw, name, int | float, origin) for name in SHAPE_KEYS},
            initializer_range=INITIALIZER_RANGE if spread is None else spread,
            **decided,
        )
    except ValueError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:] if "further information" not in line]
        raise DrafterError(
            f"{origin} describes no valid drafter: {' '.join(lines)}", remedy="correct the exported config"
        ) from error


def check_mask_token(mask_token_id: int, vocab_size: int, origin: str) -> None:
    """Refuse a mask token that is no row of the vocabulary.

    Raises:
        DrafterError: it is outside.
    """
    if not 0 <= mask_token_id < vocab_size:
        raise DrafterError(
            f"{origin} has mask_token_id {mask_token_id} outside its vocabulary of {vocab_size}", remedy="correct it"
        )


def check_layer_ids(layer_ids: tuple[int, ...], num_target_layers: int | None, origin: str) -> None:
    """Refuse taps that the target does not have, its last layer among them.

    Raises:
        DrafterError: a tap is outside 0..layers-2.
    """
    if num_target_layers is not None and layer_ids[-1] >= num_target_layers - 1:
        raise DrafterError(
            f"{origin} taps layer {layer_ids[-1]} of a target with {num_target_layers} layers (0-based)",
            remedy=f"taps are 0..{num_target_layers - 2}: engines see the last layer only after the final norm",
        )
