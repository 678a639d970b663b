"""Checks of a published folder's tensors against its own configuration and against the target's tables."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dflash.errors import DrafterError
from dflash.model.export_fields import DrafterDescription, DtypeName
from dflash.model.export_files import StoredTensor, audit_tensors, common_dtype, read_tensor
from dflash.model.export_layouts import VOCABULARY_MAPS, Layout


def audit_stored(layout: Layout, description: DrafterDescription, stored: Mapping[str, StoredTensor], *, origin: str) -> DtypeName:
    """Check names, count, shapes and dtypes of a folder's tensors.

    Returns:
        The dtype of all of the drafter's own.

    Raises:
        DrafterError: something is missing, unknown, misshapen or of another dtype.
    """
    tables = layout.table_shapes(description)
    present = {name: shape for name, shape in tables.items() if name in stored}
    maps = {name: tensor.shape for name, tensor in stored.items() if tables and name in VOCABULARY_MAPS}
    wanted = layout.shapes(description)
    audit_tensors({name: tensor.shape for name, tensor in stored.items()}, {**wanted, **present, **maps}, origin=origin)
    return common_dtype({name: tensor for name, tensor in stored.items() if name not in maps}, origin=origin)


def check_tables(
    layout: Layout,
    description: DrafterDescription,
    stored: Mapping[str, StoredTensor],
    tables: Mapping[str, Tensor] | None,
    *,
    origin: str,
) -> tuple[str, ...]:
    """Compare stored copies of the target's tables with the target's own, in the stored dtype.

    Returns:
        Names of the copies that were compared.

    Raises:
        DrafterError: a copy differs.
    """
    compared = tuple(name for name in layout.table_shapes(description) if name in stored and tables is not None)
    for name in compared:
        copy = read_tensor(name, stored[name])
        own = (tables or {})[name].to(copy.dtype)
        if copy.shape != own.shape or not torch.equal(copy, own):
            raise DrafterError(
                f"{name} in {origin} is not the target's own table",
                remedy="give the target that this drafter was trained on; a drafter with a head of its own is not supported",
            )
    return compared


def check_vocabulary_maps(stored: Mapping[str, StoredTensor]) -> None:
    """Refuse vocabulary maps that say anything but 'every token is itself'.

    Raises:
        DrafterError: a map renumbers or drops tokens.
    """
    for name in VOCABULARY_MAPS:
        if name not in stored:
            continue
        values = read_tensor(name, stored[name])
        identity = bool(values.all()) if name == "t2d" else not bool(values.any())  # d2t holds offsets
        if not identity:
            raise DrafterError(
                f"{name} maps a pruned or renumbered draft vocabulary", remedy="use a drafter of the target's full vocabulary"
            )
