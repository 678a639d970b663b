"""Looking into stored tensors: what is not finite, and whose norm has jumped since the checkpoint before.

Invariant: one tensor is held at a time, and nothing that is read can execute code (safetensors only).
The hard decision: norms are compared tensor by tensor, because one destroyed layer disappears in the norm of the whole;
only of weights, because optimizer moments are meant to move.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from dflash.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class TensorScan:
    """What one stored tensor holds.

    Attributes:
        values: number of elements.
        nonfinite: of them, NaN or infinite.
        norm: Euclidean norm of the finite ones.
    """

    name: str
    values: int
    nonfinite: int
    norm: float


@dataclass(frozen=True, slots=True)
class NormJump:
    """A tensor whose norm is `factor` times what it was (below 1: it has shrunk)."""

    name: str
    before: float
    after: float

    @property
    def factor(self) -> float:
        """Norm now over norm before."""
        return self.after / self.before


def scan_file(path: Path) -> Iterator[TensorScan]:
    """Every tensor of a safetensors file, in the order of its names.

    Raises:
        CheckpointError: it is no readable safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                yield _scanned(name, file.get_tensor(name))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"{path} is no readable safetensors file: {error}", remedy="restore the file") from error


def _scanned(name: str, tensor: torch.Tensor) -> TensorScan:
    if not tensor.is_floating_point():
        return TensorScan(name, tensor.numel(), 0, 0.0)
    wide = tensor.float() if tensor.element_size() == 1 else tensor  # the smallest kinds know no arithmetic
    finite = torch.isfinite(wide)
    lost = wide.numel() - int(finite.sum())
    kept = wide if lost == 0 else torch.where(finite, wide, torch.zeros((), dtype=wide.dtype))
    return TensorScan(name, wide.numel(), lost, float(torch.linalg.vector_norm(kept, dtype=torch.float64)))


def total_norm(scans: Sequence[TensorScan]) -> float:
    """Norm over all tensors."""
    return math.sqrt(sum(scan.norm**2 for scan in scans))


def norm_jumps(before: Mapping[str, float], after: Sequence[TensorScan], *, factor: float) -> list[NormJump]:
    """Tensors whose norm grew or shrank more than `factor` times, the largest change first.

    Args:
        before: norm by name in the checkpoint before; a tensor that is not there, or was zero, is not compared.
        after: the tensors now.
        factor: above 1.
    """
    compared = (NormJump(scan.name, before[scan.name], scan.norm) for scan in after if before.get(scan.name, 0.0) > 0.0)
    jumps = [jump for jump in compared if jump.after == 0.0 or not 1 / factor <= jump.factor <= factor]
    return sorted(jumps, key=lambda jump: -abs(math.log(jump.factor)) if jump.after else -math.inf)
