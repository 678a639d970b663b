"""The target's cache while decoding, with one rollback rule for every family of layers.

Invariant: `crop(n)` leaves the cache as if the last n tokens of the latest forward had never been fed; only that forward can be
cropped, and starting the next one settles it.
- full attention: the library's crop, exact;
- sliding window: the library records the past from the end of the prefill on, and crops it;
- linear attention (gated-delta, state space, short convolution): their state has absorbed the rejected tokens and no crop can
  undo that (the library's own raises nothing and leaves the state dirty), so the state is cloned before a verification and
  the accepted tokens are fed again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from dflash.errors import TargetError

LinearState = list[tuple[dict[int, Tensor | None], dict[int, Tensor | None], dict[int, bool]]]


class CachedStep(NamedTuple):
    """Inputs of one cached forward: ids [B, n], positions [B, n], mask [B, past + n] or None."""

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None

    def first(self, tokens: int) -> CachedStep:
        """The same step with only its first tokens."""
        dropped = self.input_ids.shape[1] - tokens
        mask = self.attention_mask if self.attention_mask is None or not dropped else self.attention_mask[:, :-dropped]
        return CachedStep(self.input_ids[:, :tokens], self.position_ids[:, :tokens], mask)


class TargetCache:
    """A `DynamicCache` with its length and what a rollback needs.

    Args:
        kv: the library's cache, empty, made from the model's config.
    """

    def __init__(self, kv: DynamicCache) -> None:
        self.kv = kv
        self.length_tokens = 0
        self._linear = [layer for layer in kv.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
        self._sliding = [layer for layer in kv.layers if isinstance(layer, DynamicSlidingWindowLayer) and layer not in self._linear]
        self._step: CachedStep | None = None
        self._snapshot: LinearState | None = None

    def begin(self, step: CachedStep) -> None:
        """Settle the previous forward and prepare for the next one."""
        if self.length_tokens:
            for layer in self._sliding:
                layer.crop(0) if layer.record_past else layer.activate_past_recording()
        # A one-token step is never rolled back in part, and the prefill is never rolled back at all.
        several = step.input_ids.shape[1] > 1
        self._snapshot = self._clone_linear() if self._linear and self.length_tokens and several else None
        self._step = step

    def commit(self) -> None:
        """Count the tokens of the forward that has just run."""
        self.length_tokens += self._fed_tokens

    def crop(self, remove_tokens: int, *, replay: Callable[[CachedStep], object]) -> None:
        """Remove the last tokens of the latest forward.

        Args:
            remove_tokens: how many; 0 keeps all.
            replay: runs a cached forward of the accepted tokens; called only for linear-attention layers.

        Raises:
            TargetError: more tokens than the latest forward fed, or a family that cannot be rolled back.
        """
        fed = self._fed_tokens
        if not 0 <= remove_tokens <= fed:
            raise TargetError(
                f"cannot remove {remove_tokens} tokens: the latest forward fed {fed}",
                remedy="crop once after each verification, by the number of rejected tokens",
            )
        if self._step is None or remove_tokens == 0:
            return
        accepted = self._step.first(fed - remove_tokens)
        undone = fed if self._linear else remove_tokens
        self._restore_linear()
        for layer in self.kv.layers:
            if isinstance(layer, CacheLayerMixin):
                _crop_attention(layer, undone)
        self.length_tokens -= undone
        self._step = accepted
        if self._linear and accepted.input_ids.shape[1]:
            replay(accepted)

    def select_rows(self, rows: Tensor) -> None:
        """Keep only the given batch rows, in that order."""
        self.kv.reorder_cache(rows)

    @property
    def _fed_tokens(self) -> int:
        return 0 if self._step is None else self._step.input_ids.shape[1]

    def _clone_linear(self) -> LinearState:
        return [
            (_cloned(layer.conv_states), _cloned(layer.recurrent_states), dict(layer.has_previous_state)) for layer in self._linear
        ]

    def _restore_linear(self) -> None:
        if not self._linear:
            return
        if self._snapshot is None:
            raise TargetError(
                "a target with linear-attention layers can only be cropped right after a forward of several tokens",
                remedy="verify blocks of at least two tokens, and never crop the prefill",
            )
        for layer, (conv, recurrent, flags) in zip(self._linear, self._snapshot, strict=True):
            _copy_into(layer.conv_states, conv)
            _copy_into(layer.recurrent_states, recurrent)
            layer.has_previous_state.update(flags)
        self._snapshot = None


def _crop_attention(layer: Any, tokens: int) -> None:
    """Crop the attention half of a layer (hybrid layers carry a linear half, restored separately)."""
    linear, sliding = isinstance(layer, LinearAttentionCacheLayerMixin), isinstance(layer, DynamicSlidingWindowLayer)
    if not isinstance(layer, DynamicLayer) or (linear and sliding):
        raise TargetError(
            f"a cache layer of type {type(layer).__name__} cannot be rolled back", remedy="decode this target without a drafter"
        )
    if linear:
        DynamicLayer.crop(layer, -tokens)
    else:
        layer.crop(-tokens)


def _cloned(states: dict[int, Tensor | None]) -> dict[int, Tensor | None]:
    return {index: None if state is None else state.clone() for index, state in states.items()}


def _copy_into(states: dict[int, Tensor | None], saved: dict[int, Tensor | None]) -> None:
    for index, value in saved.items():
        state = states[index]
        if state is not None and value is not None:
            state.copy_(value)
