"""Streaming safetensors writer: the bytes are hashed while they are written, and nothing is copied.

Invariant: the file is what the safetensors library would read back bit for bit; reading always goes through that
library. Hard decision: writing is done here because the library neither hashes nor syncs, and a second pass over
20 GB of optimizer state costs as much as the write.
Format: https://github.com/huggingface/safetensors#format (8-byte little-endian header size, JSON header, raw data).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from dflash.records import FileEntry

WRITE_CHUNK_BYTES = 4 << 20
"""Bytes a write: large enough for full disk speed, small enough that other threads get their turn."""

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_HEADER_ALIGNMENT_BYTES = 8


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileEntry:
    """Write contiguous CPU tensors as safetensors and put them on disk.

    Returns:
        Name, size and SHA-256 of the file.
    """
    digest = hashlib.sha256()
    names = sorted(tensors)
    with path.open("xb") as file:
        size_bytes = 0
        for piece in (_header(tensors, names), *(_raw(tensors[name]) for name in names)):
            for start in range(0, len(piece), WRITE_CHUNK_BYTES):
                chunk = piece[start : start + WRITE_CHUNK_BYTES]
                file.write(chunk)
                digest.update(chunk)
            size_bytes += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(name=path.name, size_bytes=size_bytes, sha256=digest.hexdigest())


def all_finite(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether no element is NaN or infinite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())


def global_norm(tensors: Mapping[str, torch.Tensor]) -> float:
    """Euclidean norm over all elements, summed in double precision."""
    squares = (float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2 for tensor in tensors.values())
    return float(sum(squares) ** 0.5)


def _header(tensors: Mapping[str, torch.Tensor], names: list[str]) -> memoryview:
    entries: dict[str, object] = {}
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT_BYTES)
    return memoryview(len(text).to_bytes(8, "little") + text)


def _raw(tensor: torch.Tensor) -> memoryview:
    data: memoryview = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    return data
