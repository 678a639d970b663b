"""Export and import of the published drafter layout: `config.json` + `model.safetensors`, audited both ways.

Invariant: a folder either holds a complete, audited export or does not exist: files are written beside it, imported again,
compared bit for bit, and only then moved into place. The audit checks names, counts and shapes of all tensors, because
engines skip unknown tensors and leave missing ones random without a word.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.errors import DrafterError
from dflash.model.drafter import Drafter
from dflash.model.export_config import drafter_config_of, hf_drafter_config, required
from dflash.model.parameters import drafter_shapes
from dflash.model.target_info import TargetInfo

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
ExportDtype = Literal["bfloat16", "float32"]
_DTYPES: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class ImportedDrafter:
    """A drafter read from a published folder, on the CPU, in the dtype of its file.

    Attributes:
        vocab_size: padded vocabulary of the target it was trained on.
        num_target_layers: decoder layers of that target.
    """

    drafter: Drafter
    mask_token_id: int
    vocab_size: int
    num_target_layers: int


def export_drafter(drafter: Drafter, out_dir: Path, *, info: TargetInfo, mask_token_id: int, dtype: ExportDtype) -> Path:
    """Write a drafter in the published layout.

    Args:
        drafter: the drafter.
        out_dir: folder to make; an earlier export there is replaced.
        info: its target.
        mask_token_id: token that fills the drafted slots.
        dtype: of the stored weights.

    Returns:
        The folder.

    Raises:
        DrafterError: the mask token is no row of the target's vocabulary, a weight is not finite, or the folder holds
            something else than an export.
    """
    _check_exportable(drafter, out_dir, info, mask_token_id)
    raw = hf_drafter_config(
        drafter.config,
        mask_token_id=mask_token_id,
        vocab_size=info.vocab_size,
        num_target_layers=info.num_hidden_layers,
        dtype=dtype,
    )
    tensors = {name: value.detach().to("cpu", _DTYPES[dtype]).contiguous() for name, value in drafter.state_dict().items()}
    partial = out_dir.with_name(f"{out_dir.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        save_file(tensors, partial / WEIGHTS_NAME, metadata={"format": "pt"})
        (partial / CONFIG_NAME).write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        _check_reimport(partial, drafter, tensors)
        _sync(partial)
        shutil.rmtree(out_dir, ignore_errors=True)
        partial.replace(out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out_dir


def import_drafter(folder: Path) -> ImportedDrafter:
    """Read a drafter from a published folder, refusing anything incomplete.

    Args:
        folder: holds `config.json` and `model.safetensors`.

    Returns:
        The drafter and what it belongs to.

    Raises:
        DrafterError: a file, key or tensor is missing, unknown or of another shape.
    """
    origin = str(folder / CONFIG_NAME)
    raw = _read_json(folder / CONFIG_NAME)
    config = drafter_config_of(raw, origin=origin)
    mask_token_id = required(raw["dflash_config"], "mask_token_id", int, f"{origin}: dflash_config")
    vocab_size = required(raw, "vocab_size", int, origin)
    if not 0 <= mask_token_id < vocab_size:
        raise DrafterError(
            f"{origin} has mask_token_id {mask_token_id} outside its vocabulary of {vocab_size}", remedy="correct it"
        )
    target_hidden_size = raw.get("target_hidden_size", config.hidden_size)
    weights = folder / WEIGHTS_NAME
    audit_tensors(_stored_shapes(weights), drafter_shapes(config, target_hidden_size=target_hidden_size), origin=str(weights))
    tensors = load_file(weights)
    drafter = Drafter(config, target_hidden_size=target_hidden_size).to(next(iter(tensors.values())).dtype)
    drafter.load_state_dict(tensors)
    return ImportedDrafter(drafter, mask_token_id, vocab_size, required(raw, "num_target_layers", int, origin))


def audit_tensors(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], *, origin: str) -> None:
    """Compare names, count and shapes of stored tensors with what the configuration asks for.

    Raises:
        DrafterError: names every missing, unknown and misshapen tensor.
    """
    problems = [f"missing {name}" for name in wanted if name not in found]
    problems += [f"unknown {name}" for name in found if name not in wanted]
    problems += [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise DrafterError(
            f"{origin} holds {len(found)} tensors, expected {len(wanted)}: {shown}",
            remedy="use weights and config of the same drafter; engines would load such a file without complaint",
        )


def _check_exportable(drafter: Drafter, out_dir: Path, info: TargetInfo, mask_token_id: int) -> None:
    if not 0 <= mask_token_id < info.vocab_size:
        raise DrafterError(
            f"mask token id {mask_token_id} is no row of the target's vocabulary ({info.vocab_size})",
            remedy="name an existing token that the corpus never uses",
        )
    shapes = {name: tuple(value.shape) for name, value in drafter.state_dict().items()}
    audit_tensors(shapes, drafter_shapes(drafter.config, target_hidden_size=drafter.target_hidden_size), origin="the drafter")
    broken = [name for name, value in drafter.state_dict().items() if not bool(value.isfinite().all())]
    if broken:
        raise DrafterError(f"weights that are not finite: {', '.join(broken[:8])}", remedy="export a clean checkpoint")
    if out_dir.is_file() or (out_dir.is_dir() and any(path.name not in (CONFIG_NAME, WEIGHTS_NAME) for path in out_dir.iterdir())):
        raise DrafterError(f"{out_dir} holds other files than an export", remedy="name an empty or a new folder")


def _check_reimport(folder: Path, drafter: Drafter, tensors: Mapping[str, Tensor]) -> None:
    again = import_drafter(folder)
    for name, value in again.drafter.state_dict().items():
        if not torch.equal(value, tensors[name]):
            raise DrafterError(f"{name} reads back differently from {folder}", remedy="check the disk and export again")
    wanted = drafter.config.model_copy(update={"layer_types": drafter.config.resolved_layer_types})
    if again.drafter.config.model_copy(update={"sliding_window": wanted.sliding_window}) != wanted:
        raise DrafterError(f"the config reads back differently from {folder}", remedy="report this: the exporter is wrong")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DrafterError(f"{file} cannot be read: {error}", remedy="give the folder of an exported drafter") from error
    if not isinstance(raw, dict):
        raise DrafterError(f"{file} holds no object", remedy="give the folder of an exported drafter")
    return raw


def _stored_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, framework="pt") as stored:
            return {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise DrafterError(f"{file} cannot be read: {error}", remedy="give the folder of an exported drafter") from error


def _sync(folder: Path) -> None:
    """Flush both files and the folder, so that the move that follows cannot expose an empty file after a crash."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
