"""Row-wise edits of the library's cache layers: shift, drop leading columns, stack.

Dimensions: B rows, L columns (positions of the right-aligned batch), W sliding window, H key heads, Dh head width.
Invariant: rows are aligned at their *last* token, so one column holds one position of every row and masks by distance
(causal, sliding) stay right; what a shorter row holds in front of its first token is masked and never read. A layer's tensors
are its own: nothing else holds them between two forwards, so rows may be edited in place.
Hard decision: a rejected token is removed by moving its row to the right, never by hiding it behind a mask: hidden keys were
right on dense models only (57 of 60 rows wrong on sliding and hybrid ones). The price is one copy of the moved rows a ragged
verification, in place on a CPU; equal rejections are a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from dflash.errors import TargetError

SUPPORTED = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer, DummyLayer)


def check_supported(layers: Sequence[Any], *, ragged: bool) -> None:
    """Refuse layer types whose rollback is not known to be exact.

    Raises:
        TargetError: one of them.
    """
    allowed = SUPPORTED if ragged else (*SUPPORTED, DynamicIndexedLayer)
    for layer in layers:
        if type(layer) not in allowed:
            raise TargetError(
                f"a cache layer of type {type(layer).__name__} cannot be rolled back", remedy="decode this target without a drafter"
            )


def attends(layer: Any) -> bool:
    """Whether the layer holds keys and values."""
    return isinstance(layer, DynamicLayer)


def slides(layer: Any) -> bool:
    """Whether the layer forgets what has left its window."""
    return isinstance(layer, DynamicSlidingWindowLayer)


def convolves_only(layer: Any) -> bool:
    """Whether the layer's linear half is a short convolution without recurrent state (known after the prefill)."""
    return isinstance(layer, LinearAttentionCacheLayerMixin) and bool(layer.is_croppable)


def recurs(layer: Any) -> bool:
    """Whether the layer has a recurrent state (known after the prefill)."""
    return isinstance(layer, LinearAttentionCacheLayerMixin) and any(layer.is_recurrent_states_initialized.values())


def crop_uniformly(layer: Any, tokens: int) -> None:
    """Remove the same number of last tokens from every row; recurrent states are not touched."""
    if attends(layer):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            DynamicLayer.crop(layer, -tokens)
        else:
            layer.crop(-tokens)
    if convolves_only(layer):
        LinearAttentionCacheLayerMixin.crop(layer, -tokens)


def realign(layer: Any, *, length: int, dropped: int, pads: Sequence[int], shifts: Tensor) -> None:
    """Move every row of an attention layer to the right by its own shift, behind dropping leading columns.

    Args:
        layer: attention layer with keys [B, H, columns, Dh].
        length: columns of the result (virtual ones, for a sliding layer).
        dropped: leading columns that no row needs any more.
        pads: columns in front of each row's first token, before the move.
        shifts: [B], how far each row moves against the longest.
    """
    if not layer.is_initialized:
        return
    held = layer.keys.shape[-2]
    columns = layer.cumulative_length if slides(layer) else held
    wanted = min(layer.sliding_window - 1, length) if slides(layer) else length
    first = (length - wanted) + dropped - (columns - held)
    if layer.keys.device.type == "cpu" and first >= 0:
        gone = columns - held  # columns that a sliding layer holds no more
        moves = [(row, pad - gone, shift) for row, (pad, shift) in enumerate(zip(pads, shifts.tolist(), strict=True)) if shift]
        layer.keys, layer.values = _slid(layer.keys, moves, first, wanted), _slid(layer.values, moves, first, wanted)
    else:
        index = torch.arange(first, first + wanted, device=layer.keys.device) - shifts.to(layer.keys.device)[:, None]
        index = index.clamp_(0, held - 1)[:, None, :, None]
        layer.keys, layer.values = _gathered(layer.keys, index), _gathered(layer.values, index)
    if slides(layer):
        layer.cumulative_length = length


def crop_convolution(layer: Any, removed: Tensor) -> None:
    """Remove each row's own number of last tokens [B] from recorded convolution states, and all but the kernel's columns."""
    for state, kernel in layer.conv_kernel_size.items():
        values = layer.conv_states[state]
        first = values.shape[-1] - kernel - removed.to(values.device)
        index = first[:, None, None] + torch.arange(kernel, device=values.device)
        layer.conv_states[state] = values.gather(-1, index.expand(-1, values.shape[1], -1))


def drop_columns(layer: Any, *, length: int) -> None:
    """Keep the last `length` columns of an attention layer (fewer in a sliding one)."""
    if not layer.is_initialized:
        return
    wanted = min(layer.sliding_window - 1, length) if slides(layer) else length
    layer.keys, layer.values = layer.keys[..., -wanted:, :], layer.values[..., -wanted:, :]
    if slides(layer):
        layer.cumulative_length = length


def stack_layers(parts: Sequence[Any], into: Any, *, length: int) -> None:
    """Fill an empty layer with the rows of several, aligned at their last token."""
    if attends(into) and parts[0].is_initialized:
        into.lazy_initialization(parts[0].keys, parts[0].values)
        wanted = min(into.sliding_window - 1, length) if slides(into) else length
        into.keys = torch.cat([_padded(part.keys, wanted) for part in parts])
        into.values = torch.cat([_padded(part.values, wanted) for part in parts])
        if slides(into):
            into.cumulative_length = length
    if isinstance(into, LinearAttentionCacheLayerMixin):
        _stack_linear(parts, into)


def replace_rows(layer: Any, rows: Sequence[int], joining: Any, *, length: int) -> None:
    """Put the rows of another layer in the place of some of a layer's own, all aligned at their last token.

    Args:
        layer: settled, with B rows.
        rows: places, one for each row of `joining`.
        joining: settled layer of the same kind.
        length: columns of the result (virtual ones, for a sliding layer), enough for both.
    """
    if attends(layer) and joining.is_initialized:
        wanted = min(layer.sliding_window - 1, length) if slides(layer) else length
        layer.keys, layer.values = _padded(layer.keys, wanted), _padded(layer.values, wanted)
        for live, new in ((layer.keys, joining.keys), (layer.values, joining.values)):
            held = min(new.shape[-2], wanted)
            for row, values in zip(rows, new, strict=True):
                live[row, :, : wanted - held] = 0
                live[row, :, wanted - held :] = values[:, new.shape[-2] - held :]
        if slides(layer):
            layer.cumulative_length = length
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for state, kernel in joining.conv_kernel_size.items():
            if joining.is_conv_states_initialized[state]:
                layer.conv_states[state][list(rows), ..., -kernel:] = joining.conv_states[state][..., -kernel:]
            if joining.is_recurrent_states_initialized[state]:
                layer.recurrent_states[state][list(rows)] = joining.recurrent_states[state]


def _stack_linear(parts: Sequence[Any], into: Any) -> None:
    for state, kernel in parts[0].conv_kernel_size.items():
        if parts[0].is_conv_states_initialized[state]:
            # A recorded state may be longer; what lies in front of the kernel's columns is past.
            joined = torch.cat([part.conv_states[state][..., -kernel:] for part in parts])
            into.lazy_initialization(conv_states=joined, state_idx=state, conv_kernel_size=kernel)
            into.conv_states[state] = joined
        if parts[0].is_recurrent_states_initialized[state]:
            joined = torch.cat([part.recurrent_states[state] for part in parts])
            into.lazy_initialization(recurrent_states=joined, state_idx=state)
            into.recurrent_states[state] = joined
        into.has_previous_state[state] = parts[0].has_previous_state[state]


def _slid(values: Tensor, moves: Sequence[tuple[int, int, int]], first: int, columns: int) -> Tensor:
    """Columns `first` onwards of [B, H, L, Dh] with some rows moved to the right by (row, first filled column, shift), on a CPU.

    What a row leaves behind is read by nobody. In place and by numpy, whose copies may overlap and start sooner: 8 rows of
    2 x 138 x 32 in eight tensors take 0.3 ms, where new tensors took 0.7.
    """
    # numpy knows no bfloat16; a copy does not look at the numbers.
    rows = (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()
    last = first + columns
    for row, filled, shift in moves:
        begin = min(max(first, max(filled, 0) + shift), last)  # a row that leaves its columns altogether is empty
        rows[row, :, begin:last] = rows[row, :, begin - shift : last - shift]
    return values[:, :, first:last]


def _gathered(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(2, index.expand(-1, values.shape[1], -1, values.shape[3]))


def _padded(values: Tensor, columns: int) -> Tensor:
    """The last `columns` columns, with zeros in front where there are fewer."""
    held = values.shape[-2]
    return values[..., held - columns :, :] if held >= columns else functional.pad(values, (0, 0, columns - held, 0))
