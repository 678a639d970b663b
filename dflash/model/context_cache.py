"""The drafter's cache while decoding: projected context keys and values, one pair of buffers a layer.

Invariant: it holds exactly the committed context 0..length-1 and never a block's own keys, so nothing has to be cropped
after a verification. Buffers grow by doubling: an append copies only the new positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST_CAPACITY_TOKENS = 64


class ContextCache:
    """Keys and values [B, Hkv, length, Dh] of each layer.

    Args:
        layers: number of drafter layers.
    """

    def __init__(self, layers: int) -> None:
        self._buffers: list[tuple[Tensor, Tensor] | None] = [None] * layers
        self._lengths = [0] * layers

    @property
    def length_tokens(self) -> int:
        """Context positions held by every layer."""
        return self._lengths[-1]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add new positions, each [B, Hkv, n, Dh], to one layer; returns all of its keys and values."""
        length = self._lengths[layer]
        end = length + keys.shape[2]
        buffers = self._buffers[layer]
        if buffers is None or buffers[0].shape[2] < end:
            buffers = self._buffers[layer] = self._grown(buffers, keys, length, end)
        buffers[0][:, :, length:end] = keys
        buffers[1][:, :, length:end] = values
        self._lengths[layer] = end
        return buffers[0][:, :, :end], buffers[1][:, :, :end]

    @staticmethod
    def _grown(old: tuple[Tensor, Tensor] | None, like: Tensor, length: int, end: int) -> tuple[Tensor, Tensor]:
        capacity = FIRST_CAPACITY_TOKENS
        while capacity < end:
            capacity *= 2
        shape = (like.shape[0], like.shape[1], capacity, like.shape[3])
        keys, values = (
            torch.empty(shape, dtype=like.dtype, device=like.device),
            torch.empty(shape, dtype=like.dtype, device=like.device),
        )
        if old is not None:
            keys[:, :, :length] = old[0][:, :, :length]
            values[:, :, :length] = old[1][:, :, :length]
        return keys, values
