"""The state test: after random forced acceptances the rolled-back cache equals a fresh cache of the committed tokens.

Dimensions: B rows, K tokens of a verification.
Invariant: the test is worth what its negative controls are worth: rollbacks that are broken on purpose must fail it, or it
proves nothing on this target. Correct paths were seen at 1e-4, a missing restore at 1.8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash.evaluate.decode import Rollback
from dflash.model.target import Target
from dflash.model.target_cache import TargetCache

STATE_TOLERANCE = 1e-3
"""Largest relative difference of a rolled-back cache from a fresh one, in float32."""

STATE_ROUNDS = 6
"""Verifications with forced acceptances of one state test."""


@dataclass(frozen=True, slots=True)
class StateProof:
    """Result of the state test on one prompt.

    Attributes:
        relative: largest relative difference of any cache tensor; infinite if lengths differ.
        controls: the same for each broken rollback; every one has to exceed the tolerance.
        judged: whether the target's numbers are float32, so that the tolerance applies.
    """

    relative: float
    controls: Mapping[str, float]
    judged: bool

    @property
    def holds(self) -> bool:
        """Whether the cache is right and the test could have noticed if it were not."""
        return not self.judged or (self.relative <= STATE_TOLERANCE and not self.blind_controls)

    @property
    def blind_controls(self) -> tuple[str, ...]:
        """Broken rollbacks that the test did not notice."""
        return tuple(name for name, value in self.controls.items() if value <= STATE_TOLERANCE)


@torch.inference_mode()
def prove_state(target: Target, prompts: Sequence[Sequence[int]], *, block_size: int, seed: int) -> StateProof:
    """Run the state test on one prompt or on a ragged batch, with the true rollback and with every broken one.

    Args:
        target: frozen target.
        prompts: prefilled before the first verification; several are one batch with acceptances of their own.
        block_size: tokens of one verification, at least 2.
        seed: of the fed tokens and forced acceptances.
    """
    relative = state_difference(target, prompts, block_size=block_size, seed=seed, rollback=target.keep)
    controls = {
        name: state_difference(target, prompts, block_size=block_size, seed=seed, rollback=rollback)
        for name, rollback in broken_rollbacks(target, ragged=len(prompts) > 1).items()
    }
    return StateProof(relative, controls, judged=target.head_weight.dtype == torch.float32)


def state_difference(target: Target, prompts: Sequence[Sequence[int]], *, block_size: int, seed: int, rollback: Rollback) -> float:
    """Largest relative difference between a cache after random forced acceptances and fresh ones of the same tokens.

    Every row has a verification that accepts nothing, one that accepts everything, and others at random between.
    """
    generator = np.random.default_rng(seed)
    _, _, cache = target.prefill(prompts, with_taps=False)
    committed = [list(prompt) for prompt in prompts]
    forced = [
        generator.permutation([1, block_size, *generator.integers(1, block_size, size=STATE_ROUNDS - 2).tolist()]).tolist()
        for _ in prompts
    ]
    # The last forward is rolled back as well: what it left behind is the thing to compare.
    for kept in zip(*forced, strict=True):
        # A verification commits its anchor in any case, so at least one token of the block stays.
        block = generator.integers(0, target.info.vocab_size, size=(len(prompts), block_size))
        target.logits_cached(torch.tensor(block, device=target.device), cache)
        rollback(cache, list(kept))
        for row, tokens in enumerate(kept):
            committed[row] += block[row, :tokens].tolist()
    return max(cache_difference(target, cache, row, tokens) for row, tokens in enumerate(committed))


def cache_difference(target: Target, cache: TargetCache, row: int, tokens: Sequence[int]) -> float:
    """Largest relative difference of any tensor of one row of a cache from a fresh cache of the row's tokens."""
    _, _, fresh = target.prefill([tokens], with_taps=False)
    return max(_row_differences(cache, row, fresh))


def broken_rollbacks(target: Target, *, ragged: bool) -> dict[str, Rollback]:
    """Negative controls: rollbacks with one mistake each, by name; those about states only where there is a state.

    Args:
        target: frozen target.
        ragged: whether rows accept different numbers.
    """

    def no_crop(_cache: TargetCache, _kept: Sequence[int]) -> None:
        """Leaves the rejected tokens in."""

    def off_by_one(cache: TargetCache, kept: Sequence[int]) -> None:
        target.keep(cache, [min(tokens + 1, cache.fed_tokens) for tokens in kept])

    def crop_only(cache: TargetCache, kept: Sequence[int]) -> None:
        """Keys and values are cropped, states keep what they absorbed."""
        dirty = [[state.clone() for state in _linear_states(layer)] for layer in cache.kv.layers]
        target.keep(cache, kept)
        for layer, states in zip(cache.kv.layers, dirty, strict=True):
            for tensor, value in zip(_linear_states(layer), states, strict=True):
                tensor.copy_(value)

    def no_restore(cache: TargetCache, kept: Sequence[int]) -> None:
        """The accepted tokens are replayed on top of the state that has absorbed the whole block."""
        cache.restores = False
        target.keep(cache, kept)
        cache.restores = True

    def shift_without_keys(cache: TargetCache, kept: Sequence[int]) -> None:
        """Rows are counted as moved to the right, but their keys stay where they were."""
        longest = max(kept)
        pads = [pad + longest - tokens for pad, tokens in zip(cache.pads, kept, strict=True)]
        target.keep(cache, [longest] * len(kept))
        cache.pads = pads

    controls: dict[str, Rollback] = {"no_crop": no_crop, "crop_off_by_one": off_by_one}
    if any(hasattr(layer, "recurrent_states") for layer in target.new_cache().kv.layers):
        controls["crop_only"] = crop_only
    if target.has_recurrent_state:
        controls["no_restore"] = no_restore
    if ragged:
        controls["shift_without_keys"] = shift_without_keys
    return controls


def _row_differences(cache: TargetCache, row: int, fresh: TargetCache) -> Iterator[float]:
    yield 0.0 if cache.row_lengths[row] == fresh.length_tokens else math.inf
    for layer, wanted in zip(cache.kv.layers, fresh.kv.layers, strict=True):
        for found, right in zip(_linear_states(layer), _linear_states(wanted), strict=True):
            yield _relative(found[row : row + 1], right)
        if getattr(wanted, "keys", None) is not None:
            # A sliding layer may still hold positions that have left the window since; a fresh one never does.
            held = wanted.keys.shape[-2]
            yield _relative(layer.keys[row : row + 1, :, layer.keys.shape[-2] - held :], wanted.keys)
            yield _relative(layer.values[row : row + 1, :, layer.values.shape[-2] - held :], wanted.values)


def _linear_states(layer: Any) -> list[Tensor]:
    """Convolution states (the columns that the kernel sees) and recurrent states of a cache layer; none on attention layers."""
    kernels = getattr(layer, "conv_kernel_size", {})
    conv = [state[..., -kernels[index] :] for index, state in getattr(layer, "conv_states", {}).items() if state is not None]
    return [*conv, *(state for state in getattr(layer, "recurrent_states", {}).values() if state is not None)]


def _relative(found: Tensor, right: Tensor) -> float:
    if found.shape != right.shape:
        return math.inf
    difference = float((found.float() - right.float()).norm())
    scale = float(right.float().norm())
    value = difference / scale if scale > 0 else (0.0 if difference == 0 else math.inf)
    return value if math.isfinite(value) else math.inf
