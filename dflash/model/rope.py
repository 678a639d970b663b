"""Rotary position embedding: plain RoPE over the whole head, at absolute positions.

Invariant: a context token's key is rotated by its own position j and a block slot's query and key by a + k, so scores
depend on distances only. The drafter never uses the target's M-RoPE, scaling or partial rotation: its base is the only
thing that it shares with the target.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, *, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotation at each position (Su et al., RoFormer, arXiv 2104.09864).

    Args:
        positions: integer positions, any shape [...].
        head_dim: width of a head, even.
        theta: base of the frequencies.
        dtype: of the result; angles are always computed in float32.

    Returns:
        cos and sin, each [..., head_dim / 2].
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions.to(torch.float32).unsqueeze(-1) * theta**-exponents
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim/2) of each vector; cos and sin broadcast to [..., head_dim / 2]."""
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
