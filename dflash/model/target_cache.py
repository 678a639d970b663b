"""The target's cache while decoding one or several rows, with one rollback rule for every family of layers.

Dimensions: B rows, n tokens of a forward. `length_tokens` columns are held; row r's first `pads[r]` of them are empty.
Invariant: `keep(kept)` leaves the cache as if only the first kept[r] tokens of the latest forward had been fed to row r; only
that forward can be rolled back, and starting the next one settles it.
- full attention: the library's crop, exact; ragged rows are shifted to the right (see `cache_layers`);
- sliding window and short convolution: the library records the past from the first verification on, and crops it;
- recurrent (gated-delta, state space): the state has absorbed the rejected tokens and no crop can undo that (the library's own
  raises nothing and leaves the state dirty). It is copied before a verification, restored after it, and the mixers (or the
  whole target, where it has no provable mixers) run again on the accepted tokens. Nothing is run when all were accepted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from dflash.errors import TargetError
from dflash.model.cache_layers import (
    attends,
    check_supported,
    convolves_only,
    crop_convolution,
    crop_uniformly,
    drop_columns,
    realign,
    recurs,
    replace_rows,
    slides,
    stack_layers,
)
from dflash.model.linear_mixers import Inputs, LinearMixers, Snapshot

Feed = Callable[[Tensor, "TargetCache"], object]
"""Feeds tokens [B, n] behind what a cache holds."""


@dataclass(frozen=True, slots=True)
class CacheRecipe:
    """What the caches of one target have in common.

    Attributes:
        make_kv: makes the library's cache, empty, from the model's config.
        feed: one cached forward of the target, for the replay of a target without mixers.
        mixers: of a recurrent target; None where it has none, or none that could be proven.
        rows_can_shift: false for attention that is cut at absolute positions (chunks), which a shifted row would miss.
    """

    make_kv: Callable[[], DynamicCache]
    feed: Feed
    mixers: LinearMixers | None
    rows_can_shift: bool

    def check_shift(self, layers: Sequence[object]) -> None:
        """Refuse rows of different lengths where they cannot be aligned.

        Raises:
            TargetError: chunked attention, or a layer type that cannot be moved.
        """
        if not self.rows_can_shift:
            raise TargetError(
                "rows of different lengths cannot be aligned: the target's attention is cut at absolute positions",
                remedy="decode its prompts one at a time",
            )
        check_supported(layers, ragged=True)


class TargetCache:
    """A `DynamicCache` with its length and what a rollback needs.

    Args:
        recipe: of the target.

    Attributes:
        device: where the rows are fed.
        restores: false only in a negative control, which must fail the state test.
    """

    def __init__(self, recipe: CacheRecipe) -> None:
        self.recipe = recipe
        self.kv = recipe.make_kv()
        self.length_tokens = 0
        self.pads: list[int] = []
        self._tokens: Tensor | None = None
        self._rolls_back = False
        self._snapshot: Snapshot | None = None
        self._tape: dict[int, Inputs] = {}
        self._recording = False
        self._replaying = False
        self.device = torch.device("cpu")
        self.restores = True

    @property
    def row_lengths(self) -> list[int]:
        """Tokens that each row holds."""
        return [self.length_tokens - pad for pad in self.pads]

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Absolute positions [B, n] of the next `tokens` tokens of each row."""
        columns = torch.arange(self.length_tokens, self.length_tokens + tokens, device=device)
        if any(self.pads):
            return columns - torch.tensor(self.pads, device=device)[:, None]
        return columns.expand(len(self.pads), -1)

    def mask(self, tokens: int, device: torch.device) -> Tensor | None:
        """Mask [B, length + n] of the filled columns with the next tokens; None where all are filled."""
        if not any(self.pads):
            return None
        columns = torch.arange(self.length_tokens + tokens, device=device)
        return (columns >= torch.tensor(self.pads, device=device)[:, None]).long()

    @contextmanager
    def feeding(self, input_ids: Tensor) -> Iterator[None]:
        """Around one forward of tokens [B, n]: settle the previous one, prepare a rollback, count the tokens."""
        batch, tokens = input_ids.shape
        if not self.length_tokens:
            self.pads, self.device = [0] * batch, input_ids.device
        # A one-token step is never rolled back in part, the prefill and a replay are never rolled back at all.
        self._rolls_back = bool(self.length_tokens) and tokens > 1 and not self._replaying
        if self.length_tokens:
            self.settle()
        self._tokens, self._tape = input_ids, {}
        recurrent = self._recurrent() if self._rolls_back else {}
        if recurrent:
            self._snapshot = Snapshot.of(list(recurrent.values()), self._snapshot)
        if recurrent and self.recipe.mixers is not None:
            with self.recipe.mixers.recording() as self._tape:
                yield
        else:
            yield
        self.length_tokens += tokens

    def keep(self, kept: Sequence[int]) -> None:
        """Keep only each row's first tokens of the latest forward.

        Args:
            kept: one number a row, 0 to the tokens of that forward.

        Raises:
            TargetError: numbers that do not fit that forward, or a family that cannot be rolled back.
        """
        fed = self.fed_tokens
        if len(kept) != len(self.pads) or not all(0 <= tokens <= fed for tokens in kept):
            raise TargetError(
                f"cannot keep {list(kept)} tokens: the latest forward fed {fed} to each of {len(self.pads)} rows",
                remedy="roll back once after each verification, by the number of rejected tokens",
            )
        if all(tokens == fed for tokens in kept):
            return
        if not self._rolls_back:
            raise TargetError(
                "the cache can only be cropped right after a forward of several tokens",
                remedy="verify blocks of at least two tokens, and never crop the prefill",
            )
        longest = max(kept)
        ragged = any(tokens != longest for tokens in kept)
        self.recipe.check_shift(self.kv.layers) if ragged else check_supported(self.kv.layers, ragged=False)
        recurrent = self._recurrent()
        if recurrent and self.recipe.mixers is None:
            self._keep_by_feeding(kept)
            return
        self._restore(recurrent)
        if ragged:
            self._keep_ragged(kept)
        else:
            for layer in self.kv.layers:
                crop_uniformly(layer, fed - longest)
            self.length_tokens -= fed - longest
        if self.recipe.mixers is not None and recurrent:
            self.recipe.mixers.replay(self._tape, recurrent, fed=fed, kept=kept)
        self._forget_forward()

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only the given batch rows, in that order, and the columns that they need."""
        if list(rows) == list(range(len(self.pads))):
            return
        index = torch.tensor(list(rows), device=self.device)
        self.settle()
        self.kv.reorder_cache(index)
        self.pads = [self.pads[row] for row in rows]
        self._forget_forward()
        self._drop_empty_columns()

    @classmethod
    def stacked(cls, parts: Sequence[TargetCache]) -> TargetCache:
        """One cache with the rows of several, aligned at their last token; the parts are used up.

        Raises:
            TargetError: rows of this target cannot be aligned.
        """
        if len(parts) == 1:
            return parts[0]
        first = parts[0]
        whole = cls(first.recipe)
        first.recipe.check_shift(whole.kv.layers)
        whole.device = first.device
        whole.length_tokens = max(part.length_tokens for part in parts)
        whole.pads = [whole.length_tokens - length for part in parts for length in part.row_lengths]
        for part in parts:
            part.settle()
        for index, layer in enumerate(whole.kv.layers):
            stack_layers([part.kv.layers[index] for part in parts], layer, length=whole.length_tokens)
        return whole

    def replace_rows(self, rows: Sequence[int], joining: TargetCache) -> None:
        """Let the rows of another cache take the places of some of this one's; the other one is used up.

        Raises:
            TargetError: rows of this target cannot be aligned.
        """
        self.recipe.check_shift(self.kv.layers)
        self.settle()
        joining.settle()
        length = max(self.length_tokens, joining.length_tokens)
        self.pads = [pad + length - self.length_tokens for pad in self.pads]
        for row, tokens in zip(rows, joining.row_lengths, strict=True):
            self.pads[row] = length - tokens
        for layer, other in zip(self.kv.layers, joining.kv.layers, strict=True):
            replace_rows(layer, rows, other, length=length)
        self.length_tokens = length
        self._forget_forward()
        self._drop_empty_columns()

    @property
    def fed_tokens(self) -> int:
        """Tokens of the latest forward that can still be rolled back."""
        return 0 if self._tokens is None else self._tokens.shape[1]

    def _recurrent(self) -> dict[int, object]:
        return {index: layer for index, layer in enumerate(self.kv.layers) if recurs(layer)}

    def settle(self) -> None:
        """Forget what only a rollback needed; start recording before the first forward that may be rolled back."""
        if self._recording:
            for layer in self.kv.layers:
                if slides(layer):
                    layer.crop(0)
                elif convolves_only(layer):
                    LinearAttentionCacheLayerMixin.crop(layer, 0)
        elif self._rolls_back:
            self._recording = True
            for layer in self.kv.layers:
                if slides(layer) or convolves_only(layer):
                    layer.activate_past_recording()

    def _forget_forward(self) -> None:
        """Nothing of the latest forward can be rolled back any more."""
        self._tokens, self._rolls_back, self._tape = None, False, {}

    def _restore(self, recurrent: dict[int, object]) -> None:
        if recurrent and self._snapshot is not None and self.restores:
            self._snapshot.restore(list(recurrent.values()))

    def _keep_ragged(self, kept: Sequence[int]) -> None:
        fed, longest = self.fed_tokens, max(kept)
        shifts = [longest - tokens for tokens in kept]
        pads = [pad + shift for pad, shift in zip(self.pads, shifts, strict=True)]
        dropped = min(pads)
        length = self.length_tokens - (fed - longest) - dropped
        moves = torch.tensor(shifts, device=self.device)
        for layer in self.kv.layers:
            if attends(layer):
                realign(layer, length=length, dropped=dropped, pads=self.pads, shifts=moves)
            if convolves_only(layer):
                crop_convolution(layer, torch.tensor([fed - tokens for tokens in kept], device=self.device))
        self.length_tokens, self.pads = length, [pad - dropped for pad in pads]

    def _drop_empty_columns(self) -> None:
        dropped = min(self.pads)
        if dropped:
            self.length_tokens -= dropped
            self.pads = [pad - dropped for pad in self.pads]
            for layer in self.kv.layers:
                if attends(layer):
                    drop_columns(layer, length=self.length_tokens)

    def _keep_by_feeding(self, kept: Sequence[int]) -> None:
        """Without mixers: take the whole forward back and feed the accepted tokens again, in groups of equal length."""
        fed, tokens = self.fed_tokens, self._tokens
        self._restore(self._recurrent())
        for layer in self.kv.layers:
            crop_uniformly(layer, fed)
        self.length_tokens -= fed
        self._forget_forward()
        if tokens is None or not any(kept):
            return
        if len(set(kept)) == 1:
            self.replay(tokens[:, : kept[0]])
            return
        order = sorted(range(len(kept)), key=kept.__getitem__)
        parts = []
        for length, group in itertools.groupby(order, key=kept.__getitem__):
            rows = list(group)
            part = self._copy_of_rows(rows)
            if length:
                part.replay(tokens[rows, :length])
            parts.append(part)
        whole = TargetCache.stacked(parts)
        whole.select_rows([order.index(row) for row in range(len(order))])
        self.kv, self.length_tokens, self.pads = whole.kv, whole.length_tokens, whole.pads
        self._recording, self._snapshot = False, None

    def replay(self, tokens: Tensor) -> None:
        """Feed accepted tokens [B, n] again; this forward cannot be rolled back."""
        self._replaying = True
        try:
            self.recipe.feed(tokens, self)
        finally:
            self._replaying = False
        self._forget_forward()

    def _copy_of_rows(self, rows: list[int]) -> TargetCache:
        part = TargetCache(self.recipe)
        part.length_tokens, part.pads, part.device = self.length_tokens, list(self.pads), self.device
        for layer, empty in zip(self.kv.layers, part.kv.layers, strict=True):
            stack_layers([layer], empty, length=self.length_tokens)
        part.select_rows(rows)
        return part
