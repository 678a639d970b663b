"""Export, import and audit of published drafters: the wiring of the model room's functions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dflash.checkpoint import current_states, load_checkpoint, newest_durable, read_ledger, read_manifest
from dflash.config import Config, TargetConfig, load_config
from dflash.errors import CheckpointError, DrafterError, RunStateError
from dflash.model.drafter import Drafter
from dflash.model.export import ImportedDrafter, describe_export, export_drafter, import_drafter
from dflash.model.export_audit import audit_folder
from dflash.model.export_fields import DrafterDescription, DtypeName, LayoutName
from dflash.model.export_files import CONFIG_NAME as HF_CONFIG_NAME
from dflash.model.export_files import read_json
from dflash.model.export_layouts import LAYOUTS, Layout, layout_of
from dflash.model.frozen_tables import frozen_tables
from dflash.model.target_info import TargetInfo, read_target_info
from dflash.records import CheckResult, RunPaths

CONFIG_FILE = "config.yaml"


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: the folder, its layout, and the step it was trained for (None for a converted folder)."""

    folder: Path
    layout: LayoutName
    dtype: DtypeName
    step: int | None


def export_stage(source: Path, *, output: Path, layout: LayoutName, dtype: DtypeName | None) -> Exported:
    """Export a run's newest durable checkpoint, or one checkpoint's folder.

    Args:
        source: a run's folder or `<run>/checkpoints/step-N`.
        output: folder to make.
        layout: published layout.
        dtype: of the weights; None is float32 for a run on a CPU and bfloat16 for one on GPUs.

    Raises:
        RunStateError, CheckpointError, DrafterError: no such checkpoint, it is damaged, or the layout cannot express it.
    """
    checkpoint = source if (source / "manifest.json").is_file() else newest_checkpoint(RunPaths(source))
    config = config_of(checkpoint)
    chosen: DtypeName = dtype or ("float32" if config.cluster.device == "cpu" else "bfloat16")
    step = read_manifest(checkpoint).step
    name = config.target.path
    written = write_checkpoint(config, checkpoint, output=output, layout=layout, dtype=chosen, target_name=name)
    return Exported(written, layout, chosen, step)


def write_checkpoint(
    config: Config, checkpoint: Path, *, output: Path, layout: LayoutName, dtype: DtypeName, target_name: str
) -> Path:  # fmt: skip
    """Write a checkpoint's drafter in a published layout, audited and re-imported; returns the folder.

    `target_name` is what the written configuration calls the target, where the layout has a place for it.
    """
    loaded = load_checkpoint(checkpoint)
    info = read_target_info(config.target)
    drafter = Drafter(config.drafter, target_hidden_size=info.hidden_size)
    drafter.load_state_dict(loaded.drafter)
    description = describe_export(config.drafter, info, mask_token_id=loaded.manifest.mask_token_id, target_name=target_name)
    tables = frozen_tables(Path(info.location)) if LAYOUTS[layout].stores_tables else None
    return export_drafter(drafter, output, description=description, layout=layout, dtype=dtype, tables=tables)


def import_stage(folder: Path, *, output: Path, layout: LayoutName, target: str | None) -> Exported:
    """Read a published drafter of any layout and write it in another, bit for bit in the dtype that it has.

    Args:
        folder: published drafter.
        output: folder to make.
        layout: of the folder that is written.
        target: the target's folder; needed where the written layout says more than the read one, or stores its tables.

    Raises:
        DrafterError: the folder is incomplete, contradicts the target, or the layout cannot express it.
    """
    info = None if target is None else target_at(target)
    tables = tables_of(info, stored_in(folder), LAYOUTS[layout])
    imported = import_drafter(folder, tables=tables)
    description = imported.description
    if info is not None:
        known = describe_export(
            description.config,
            info,
            mask_token_id=description.mask_token_id,
            target_name=description.target_name or str(target),
        )
        check_same_target(imported, info)
        description = known
    written = export_drafter(imported.drafter, output, description=description, layout=layout, dtype=imported.dtype, tables=tables)
    return Exported(written, layout, imported.dtype, None)


def audit_stage(folder: Path, *, target: str | None) -> tuple[CheckResult, ...]:
    """Audit a published drafter, against its target where that is at hand."""
    info = None if target is None else target_at(target)
    try:
        tables = tables_of(info, stored_in(folder))
    except DrafterError:  # the audit itself says what is wrong with the folder
        tables = None
    return audit_folder(folder, target=info, tables=tables)


def target_at(location: str) -> TargetInfo:
    """A target's shape from its folder; never from the hub."""
    return read_target_info(TargetConfig(path=location, mask_token_id=0, local_files_only=True))


def check_same_target(imported: ImportedDrafter, info: TargetInfo) -> None:
    """Refuse a drafter of another target.

    Raises:
        RunStateError: vocabulary, width or number of layers differ; the message names all of them.
    """
    check_described(imported.description, info)


def check_described(description: DrafterDescription, info: TargetInfo) -> None:
    """The same for a drafter of which only the description was read."""
    pairs = {
        "vocabulary": (description.vocab_size, info.vocab_size),
        "hidden size": (description.target_hidden_size, info.hidden_size),
        "layers": (description.num_target_layers or info.num_hidden_layers, info.num_hidden_layers),
    }
    wrong = [f"{name} {one} against {other}" for name, (one, other) in pairs.items() if one != other]
    if wrong:
        raise RunStateError(
            f"the drafter belongs to another target than {info.location}: {', '.join(wrong)}",
            remedy="give the target that it was trained on",
        )


def stored_in(folder: Path) -> Layout:
    """The layout of a published folder.

    Raises:
        DrafterError: it is none that is known.
    """
    return layout_of(read_json(folder / HF_CONFIG_NAME), origin=str(folder / HF_CONFIG_NAME))


def tables_of(info: TargetInfo | None, *layouts: Layout) -> dict[str, Tensor] | None:
    """The target's tables, if one of the layouts stores copies of them and the target is at hand."""
    if info is None or not any(layout.stores_tables for layout in layouts):
        return None
    return frozen_tables(Path(info.location))


def newest_checkpoint(paths: RunPaths) -> Path:
    """Folder of a run's newest durable checkpoint.

    Raises:
        CheckpointError: it has none.
    """
    step = newest_durable(paths.checkpoints_dir, current_states(read_ledger(paths.ledger)))
    if step is None:
        raise CheckpointError(
            f"{paths.root} is no run with a durable checkpoint", remedy="give a trained run's folder, or one of its checkpoints"
        )
    return paths.checkpoint(step)


def config_of(checkpoint: Path) -> Config:
    """The configuration of the run that a checkpoint lies in.

    Raises:
        RunStateError: it lies in no run's folder.
    """
    file = checkpoint.parent.parent / CONFIG_FILE
    if not file.is_file():
        raise RunStateError(
            f"{checkpoint} lies in no run's folder: there is no {CONFIG_FILE} two folders up",
            remedy="give <run>/checkpoints/step-N where it was written",
        )
    return load_config(file)
