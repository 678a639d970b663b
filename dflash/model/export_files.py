"""Files of a published folder: JSON and safetensors, in one file or in the shards that an index names.

Invariant: names, shapes and dtypes come from the headers, before any weight is read; an index and its shards must agree both
ways, so that a renamed or a forgotten tensor is an error and not a random weight. Pickled files are never opened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash.errors import DrafterError
from dflash.model.export_fields import DtypeName

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_REMEDY = "give the folder of an exported drafter"

DTYPES: dict[DtypeName, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_HEADER_DTYPES: dict[str, DtypeName] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""Dtypes that a drafter may be stored in, by their names in safetensors headers."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as the file's header describes it; `dtype` is the header's own word where it is no float we know."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        DrafterError: the file is missing, no JSON, or holds something else.
    """
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DrafterError(f"{file} cannot be read: {error}", remedy=_REMEDY) from error
    if not isinstance(raw, dict):
        raise DrafterError(f"{file} holds no object", remedy=_REMEDY)
    return raw


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder, from the headers of `model.safetensors` or of the shards that its index names.

    Raises:
        DrafterError: a file is missing or damaged, or index and shards disagree.
    """
    index = folder / INDEX_NAME
    if not index.is_file():
        return dict(_headers(folder / WEIGHTS_NAME))
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(name, str) and Path(name).name == name for name in named.values()):
        raise DrafterError(f"{index} has no weight_map of file names beside it", remedy=_REMEDY)
    found: dict[str, StoredTensor] = {}
    for shard in sorted(set(named.values())):
        for name, tensor in _headers(folder / shard):
            if name in found:
                raise DrafterError(f"{name} is stored twice: in {found[name].file.name} and in {shard}", remedy="export it again")
            found[name] = tensor
    wrong = [name for name, shard in named.items() if name not in found or found[name].file.name != shard]
    wrong += [name for name in found if name not in named]
    if wrong:
        raise DrafterError(
            f"{index} and its shards disagree about {len(wrong)} tensors: {', '.join(sorted(wrong)[:8])}",
            remedy="download or export the drafter again",
        )
    return found


def read_tensor(name: str, stored: StoredTensor) -> Tensor:
    """One tensor's values.

    Raises:
        DrafterError: the file cannot be read.
    """
    try:
        with safe_open(stored.file, framework="pt") as file:
            value: Tensor = file.get_tensor(name)
            return value
    except (OSError, SafetensorError) as error:
        raise DrafterError(f"{stored.file} cannot be read: {error}", remedy=_REMEDY) from error


def write_files(folder: Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write `config.json` and `model.safetensors` into a new folder and put them on disk."""
    folder.mkdir(parents=True)
    save_file(dict(tensors), folder / WEIGHTS_NAME, metadata={"format": "pt"})
    (folder / CONFIG_NAME).write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    # safetensors makes its file private: whoever may read the configuration may read the weights, a server of another user too.
    (folder / WEIGHTS_NAME).chmod((folder / CONFIG_NAME).stat().st_mode & 0o777)
    for path in (*folder.iterdir(), folder):  # so that the move that follows cannot expose an empty file after a crash
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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


def common_dtype(stored: Mapping[str, StoredTensor], *, origin: str) -> DtypeName:
    """The one dtype of all tensors.

    Raises:
        DrafterError: several, or one that no engine runs a drafter in.
    """
    kinds = sorted({tensor.dtype for tensor in stored.values()})
    if len(kinds) != 1 or kinds[0] not in DTYPES:
        raise DrafterError(
            f"{origin} stores its weights as {', '.join(kinds)}", remedy="store all of them as bfloat16, float16 or float32"
        )
    return next(name for name in DTYPES if name == kinds[0])


def _headers(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 (no mapping)
                part = stored.get_slice(name)
                dtype = str(part.get_dtype())
                yield name, StoredTensor(file, tuple(part.get_shape()), _HEADER_DTYPES.get(dtype, dtype))
    except (OSError, SafetensorError) as error:
        raise DrafterError(f"{file} cannot be read: {error}", remedy=_REMEDY) from error
