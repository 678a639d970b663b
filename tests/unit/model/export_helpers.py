"""A tiny saved target and drafters exported for it, for the tests of published layouts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from model_fixtures import tiny_drafter, tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.config import DrafterConfig, TargetConfig
from dflash.model.export import describe_export, export_drafter
from dflash.model.export_fields import DrafterDescription, DtypeName, LayoutName
from dflash.model.frozen_tables import frozen_tables
from dflash.model.target_info import TargetInfo, read_target_info

MASK = 60


def saved_target(folder: Path, family: str = "qwen3", *, seed: int = 0) -> TargetInfo:
    """A tiny random target on disk, and its info."""
    tiny_model(family, seed=seed).save_pretrained(folder)
    return read_target_info(TargetConfig(path=str(folder), mask_token_id=MASK))


def description_of(config: DrafterConfig, info: TargetInfo) -> DrafterDescription:
    return describe_export(config, info, mask_token_id=MASK, target_name="some/target")


def export_tiny(folder: Path, config: DrafterConfig, info: TargetInfo, *, layout: LayoutName, dtype: DtypeName = "float32") -> Path:
    tables: Mapping[str, Tensor] | None = frozen_tables(Path(info.location)) if layout == "speculators" else None
    return export_drafter(
        tiny_drafter(config), folder, description=description_of(config, info), layout=layout, dtype=dtype, tables=tables
    )


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    raw = json.loads((folder / "config.json").read_text())
    edit(raw)
    (folder / "config.json").write_text(json.dumps(raw))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder: Path, *, parts: int) -> None:
    """Spread a folder's weights over shards with an index, as large models are published."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    named: dict[str, str] = {}
    for part in range(parts):
        file = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        names = sorted(tensors)[part::parts]
        save_file({name: tensors[name] for name in names}, folder / file)
        named |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": named}))
