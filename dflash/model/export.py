"""Export and import of published drafters, in three layouts, audited both ways.

Invariant: a folder either holds a complete, audited export or does not exist: files are written beside it, imported again,
compared bit for bit, and only then exchanged with what stood there. Names, count, shapes and dtypes of all tensors are
checked before a weight is read, because engines skip unknown tensors and leave missing ones random without a word.
Hard decision: some layouts carry copies of the target's embedding and head. They are written from the target's own files and
never trusted on the way back: with the target at hand they must equal its own, and either way they are left out.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from dflash.config import DrafterConfig
from dflash.errors import DrafterError
from dflash.model.drafter import Drafter
from dflash.model.export_checks import audit_stored, check_tables, check_vocabulary_maps
from dflash.model.export_fields import DrafterDescription, DtypeName, LayoutName
from dflash.model.export_files import (
    CONFIG_NAME,
    DTYPES,
    INDEX_NAME,
    WEIGHTS_NAME,
    audit_tensors,
    read_json,
    read_tensor,
    stored_tensors,
    write_files,
)
from dflash.model.export_layouts import LAYOUTS, Layout, layout_of
from dflash.model.export_swap import partial_path, recover, replace_folder
from dflash.model.parameters import drafter_shapes
from dflash.model.target_info import TargetInfo

_OWN_FILES = (CONFIG_NAME, WEIGHTS_NAME)


@dataclass(frozen=True, slots=True)
class ImportedDrafter:
    """A drafter read from a published folder, on the CPU, in the dtype of its file."""

    drafter: Drafter
    description: DrafterDescription
    layout: LayoutName
    dtype: DtypeName


def describe_export(config: DrafterConfig, info: TargetInfo, *, mask_token_id: int, target_name: str) -> DrafterDescription:
    """What an export says about a drafter of our own and its target.

    Args:
        config: the drafter's shape.
        info: its target.
        mask_token_id: token that fills the drafted slots.
        target_name: hub name or folder of the target, as readers of the export should know it.
    """
    architectures: tuple[str, ...] = ()
    if (Path(info.location) / CONFIG_NAME).is_file():
        architectures = tuple(read_json(Path(info.location) / CONFIG_NAME).get("architectures") or ())
    return DrafterDescription(
        config=config,
        mask_token_id=mask_token_id,
        vocab_size=info.vocab_size,
        num_target_layers=info.num_hidden_layers,
        target_hidden_size=info.hidden_size,
        target_name=target_name,
        target_architectures=architectures,
    )


def export_drafter(
    drafter: Drafter,
    out_dir: Path,
    *,
    description: DrafterDescription,
    layout: LayoutName,
    dtype: DtypeName,
    tables: Mapping[str, Tensor] | None,
) -> Path:
    """Write a drafter in a published layout.

    Args:
        drafter: the drafter.
        out_dir: folder to make; an earlier export there is replaced, without a moment in which there is none.
        description: the drafter and its target.
        layout: which one.
        dtype: of the stored weights.
        tables: the target's embedding and head (`frozen_tables`), for layouts that store copies of them.

    Returns:
        The folder.

    Raises:
        DrafterError: the layout cannot express this drafter, the mask token is no row of the target's vocabulary, a weight
            is not finite, tables are needed and missing, or the folder holds something else than an export or cannot be
            written.
    """
    place = out_dir.resolve()  # `.` has no name to swap, and a link is not what shall be replaced
    _check_exportable(drafter, place, description)
    form = LAYOUTS[layout]
    raw = form.config(description, dtype=dtype)
    state = {form.file_name(name): value for name, value in drafter.state_dict().items()}
    state |= _tables_to_store(form, description, tables)
    tensors = {name: value.detach().to("cpu", DTYPES[dtype]).contiguous() for name, value in state.items()}
    partial = partial_path(place)
    try:
        recover(place)
        write_files(partial, raw, tensors)
        _check_reimport(partial, form, description, tensors)
        replace_folder(partial, place)
    except (OSError, SafetensorError) as error:
        raise DrafterError(
            f"{out_dir} cannot be written: {error}", remedy="name a folder that can be, on a disk with room"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out_dir


def import_drafter(folder: Path, *, tables: Mapping[str, Tensor] | None) -> ImportedDrafter:
    """Read a drafter from a published folder of any layout, refusing anything incomplete.

    Args:
        folder: holds `config.json` and `model.safetensors`, or shards and their index.
        tables: the target's embedding and head if it is at hand; stored copies must equal them.

    Returns:
        The drafter and what it belongs to.

    Raises:
        DrafterError: a file, key or tensor is missing, unknown, of another shape or of another dtype, or a stored copy of
            one of the target's tables is not the target's.
    """
    raw = read_json(folder / CONFIG_NAME)
    origin = str(folder / CONFIG_NAME)
    layout = layout_of(raw, origin=origin)
    description = layout.describe(raw, origin=origin)
    stored = stored_tensors(folder)
    dtype = audit_stored(layout, description, stored, origin=str(folder))
    check_tables(layout, description, stored, tables, origin=str(folder))
    check_vocabulary_maps(stored)
    drafter = Drafter(description.config, target_hidden_size=description.target_hidden_size).to(DTYPES[dtype])
    names = {layout.file_name(name): name for name in drafter.state_dict()}
    drafter.load_state_dict({own: read_tensor(name, stored[name]) for name, own in names.items()})
    return ImportedDrafter(drafter, description, layout.name, dtype)


def _tables_to_store(layout: Layout, description: DrafterDescription, tables: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    wanted = layout.table_shapes(description)
    if not wanted:
        return {}
    if tables is None:
        raise DrafterError(
            f"the {layout.name} layout stores the target's embedding and head, and the target is not at hand",
            remedy="give the target's folder as well (--target FOLDER)",
        )
    audit_tensors({name: tuple(tables[name].shape) for name in wanted if name in tables}, wanted, origin="the target")
    # A tied target gives one tensor twice, and the file format refuses two names on one memory.
    return {name: tables[name].clone() for name in wanted}


def _check_exportable(drafter: Drafter, out_dir: Path, description: DrafterDescription) -> None:
    if not 0 <= description.mask_token_id < description.vocab_size:
        raise DrafterError(
            f"mask token id {description.mask_token_id} is no row of the target's vocabulary ({description.vocab_size})",
            remedy="name an existing token that the corpus never uses",
        )
    state = drafter.state_dict()
    wanted = drafter_shapes(description.config, target_hidden_size=description.target_hidden_size)
    audit_tensors({name: tuple(value.shape) for name, value in state.items()}, wanted, origin="the drafter")
    broken = [name for name, value in state.items() if not bool(value.isfinite().all())]
    if broken:
        raise DrafterError(f"weights that are not finite: {', '.join(broken[:8])}", remedy="export a clean checkpoint")
    known = (*_OWN_FILES, INDEX_NAME)
    if out_dir.is_file() or (out_dir.is_dir() and any(path.name not in known for path in out_dir.iterdir())):
        raise DrafterError(f"{out_dir} holds other files than an export", remedy="name an empty or a new folder")


def _check_reimport(folder: Path, layout: Layout, description: DrafterDescription, tensors: Mapping[str, Tensor]) -> None:
    again = import_drafter(folder, tables=None)
    stored = stored_tensors(folder)
    for name, value in tensors.items():
        if not torch.equal(read_tensor(name, stored[name]), value):
            raise DrafterError(f"{name} reads back differently from {folder}", remedy="check the disk and export again")
    for name, value in again.drafter.state_dict().items():
        if not torch.equal(value, tensors[layout.file_name(name)]):
            raise DrafterError(f"{name} is imported differently from {folder}", remedy="report this: the exporter is wrong")
    found, wanted = (_comparable(item) for item in (again.description, description))
    if found != wanted:
        raise DrafterError(f"the config reads back differently from {folder}", remedy="report this: the exporter is wrong")


def _comparable(description: DrafterDescription) -> tuple[object, ...]:
    """What every layout must give back: all that changes a number."""
    config = description.config
    sliding = "sliding_attention" in config.resolved_layer_types
    settled = config.model_copy(
        update={
            "layer_types": config.resolved_layer_types,
            "sliding_window": config.sliding_window if sliding else None,
            "sliding_causal": config.sliding_causal if sliding else True,
        }
    )
    return settled, description.mask_token_id, description.vocab_size, description.target_hidden_size
