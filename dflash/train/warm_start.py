"""Warm start: the weights that a run begins with, from a published drafter's folder.

Invariant: every key of the drafter section that gives a weight its meaning must be the published drafter's, and all that
differ are listed at once. What only widens the use (positions, initial spread) may differ; another block size is said aloud,
because the weights fit and the drafter was not trained for it.
"""

from __future__ import annotations

import logging
from pathlib import Path

from dflash.config import DrafterConfig
from dflash.errors import DrafterError
from dflash.model.drafter import Drafter
from dflash.model.export import import_drafter
from dflash.model.export_fields import DrafterDescription
from dflash.model.export_files import CONFIG_NAME, read_json
from dflash.model.export_layouts import layout_of
from dflash.model.target_info import TargetInfo

logger = logging.getLogger(__name__)

FREE_KEYS = ("max_position_embeddings", "initializer_range", "block_size")


def check_warm_start(folder: Path, config: DrafterConfig) -> DrafterDescription:
    """Compare a published drafter's configuration with the drafter section, without reading weights.

    Returns:
        What the folder describes.

    Raises:
        DrafterError: it is no published drafter, or some keys differ; the message lists all of them.
    """
    origin = str(folder / CONFIG_NAME)
    raw = read_json(folder / CONFIG_NAME)
    description = layout_of(raw, origin=origin).describe(raw, origin=origin)
    differences = config_differences(description.config, config)
    if differences:
        raise DrafterError(
            f"train.init_from {folder} is another drafter than the drafter section describes:\n  " + "\n  ".join(differences),
            remedy="set these keys of the drafter section to the published values, or leave train.init_from out",
        )
    return description


def config_differences(published: DrafterConfig, wanted: DrafterConfig) -> list[str]:
    """One line for every key that gives weights another meaning, `key: published -> wanted`."""
    pairs = {key: (getattr(published, key), getattr(wanted, key)) for key in DrafterConfig.model_fields if key not in FREE_KEYS}
    pairs["layer_types"] = (published.resolved_layer_types, wanted.resolved_layer_types)
    if "sliding_attention" not in wanted.resolved_layer_types:  # nothing slides, so neither key means anything
        pairs.pop("sliding_window")
        pairs.pop("sliding_causal")
    return [f"{key}: published {_shown(one)}, configured {_shown(other)}" for key, (one, other) in pairs.items() if one != other]


def warm_start(drafter: Drafter, folder: Path, *, mask_token_id: int, info: TargetInfo) -> None:
    """Set a drafter's weights to those of a published one.

    Args:
        drafter: in float32, already on its device.
        folder: published drafter of any layout.
        mask_token_id: of the data set.
        info: the run's target.

    Raises:
        DrafterError: the folder is incomplete, or it belongs to another configuration, mask token or target.
    """
    check_warm_start(folder, drafter.config)
    published = import_drafter(folder, tables=None)
    description = published.description
    pairs = {
        "mask token id": (description.mask_token_id, mask_token_id),
        "vocabulary": (description.vocab_size, info.vocab_size),
        "target hidden size": (description.target_hidden_size, info.hidden_size),
        "target layers": (description.num_target_layers or info.num_hidden_layers, info.num_hidden_layers),
    }
    wrong = [f"{name}: published {one}, run {other}" for name, (one, other) in pairs.items() if one != other]
    if wrong:
        raise DrafterError(
            f"train.init_from {folder} was trained for another target or mask token:\n  " + "\n  ".join(wrong),
            remedy="use a drafter of this target, and the mask token that it was trained with",
        )
    if description.config.block_size != drafter.config.block_size:
        logger.warning(
            "the published drafter was trained with block size %d, this run trains %d",
            description.config.block_size,
            drafter.config.block_size,
        )
    drafter.load_state_dict({name: value.float() for name, value in published.drafter.state_dict().items()})
    logger.info("the drafter starts from %s (%s layout, %s)", folder, published.layout, published.dtype)


def _shown(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
