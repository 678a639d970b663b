"""What lossless means at temperature 0, and the proof that is repeated in every evaluation.

Contract:
1. *State*: after random forced acceptances the rolled-back cache equals a fresh cache of the committed tokens, relative
   difference at most `STATE_TOLERANCE` (correct paths were seen at 1e-4, a missing restore at 1.8). The same test run
   with rollbacks that are broken on purpose must fail; otherwise it proves nothing here.
2. *Tokens*: speculative and plain decoding return the same tokens. Feeding K tokens at once rounds differently from
   feeding one (1e-5 on dense models, up to 1e-3 on hybrids), so a difference is excused only as a near-tie: at every
   token of the speculative answer the target's preference for another token, measured by feeding that answer one token
   at a time, is within `near_tie_factor` times the largest logit difference between feeding it singly and in blocks, two
   paths that are both correct and never roll back.

Outside float32 equality is not promised: the number of differing prompts is reported and the state test is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash.evaluate.decode import DecodeLimits, Rollback, feed, prefill
from dflash.model.target import Target
from dflash.model.target_cache import TargetCache

STATE_TOLERANCE = 1e-3
"""Largest relative difference of a rolled-back cache from a fresh one, in float32."""

MAX_ROUNDING_FRAC = 1e-2
"""A difference between two correct float32 paths above this share of the largest logit is no rounding: nothing is excused."""

STATE_ROUNDS = 6
"""Verifications with forced acceptances of one state test."""


@dataclass(frozen=True, slots=True)
class NearTie:
    """Why an answer that differs from plain decoding is, or is not, excused.

    Attributes:
        position: first differing token of the answer.
        margin: largest preference (logit) of the target for another token than the answer's, at `position` or behind it.
        rounding: largest logit difference between feeding the answer singly and in blocks.
        excused: `margin <= near_tie_factor * rounding`, and the answer ends where it may.
    """

    position: int
    margin: float
    rounding: float
    excused: bool


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
def explain_difference(
    target: Target,
    prompt_ids: Sequence[int],
    *,
    answers: tuple[Sequence[int], Sequence[int]],
    limits: DecodeLimits,
    block_size: int,
    near_tie_factor: float,
) -> NearTie:
    """Judge an answer that differs from plain decoding by the near-tie rule of the contract.

    Args:
        target: frozen target.
        prompt_ids: what both answered.
        answers: the plain and the speculative one.
        limits: where answers may end.
        block_size: tokens of one verification.
        near_tie_factor: accepted preference, in units of the rounding.
    """
    plain, speculative = answers
    singly = teacher_forced_logits(target, prompt_ids, speculative, chunk_tokens=1)
    blocks = teacher_forced_logits(target, prompt_ids, speculative, chunk_tokens=block_size)
    rounding = float((singly - blocks).abs().max())
    position = next(
        (index for index, (a, b) in enumerate(zip(plain, speculative, strict=False)) if a != b), min(len(plain), len(speculative))
    )
    chosen = torch.tensor(list(speculative), device=singly.device)
    margins = singly.max(dim=-1).values - singly.gather(1, chosen[:, None])[:, 0]
    margin = float(margins[position:].max()) if position < len(speculative) else math.inf
    rounds_only = singly.dtype != torch.float32 or rounding <= MAX_ROUNDING_FRAC * float(singly.abs().max())
    whole = bool(speculative) and limits.reaching(speculative, have=0) == (len(speculative), True)
    excused = math.isfinite(margin) and margin <= near_tie_factor * rounding and rounds_only and whole
    return NearTie(position, margin, rounding, excused)


def teacher_forced_logits(target: Target, prompt_ids: Sequence[int], answer: Sequence[int], *, chunk_tokens: int) -> Tensor:
    """Logits that predict each token of a given answer, fed `chunk_tokens` at a time and never rolled back.

    Returns:
        `[T, V]` in the target's dtype; row t predicts `answer[t]`.
    """
    cache = target.new_cache()
    rows = [prefill(target, prompt_ids, cache)[0]]
    for begin in range(0, len(answer) - 1, chunk_tokens):
        ids = torch.tensor([list(answer[begin : min(begin + chunk_tokens, len(answer) - 1)])], device=target.device)
        rows.append(feed(target, ids, cache)[0])
    return torch.cat(rows)


@torch.inference_mode()
def prove_state(target: Target, prompt_ids: Sequence[int], *, block_size: int, seed: int) -> StateProof:
    """Run the state test of the contract on one prompt, with the true rollback and with every broken one.

    Args:
        target: frozen target.
        prompt_ids: prefilled before the first verification.
        block_size: tokens of one verification, at least 2.
        seed: of the fed tokens and forced acceptances.
    """
    relative = state_difference(target, prompt_ids, block_size=block_size, seed=seed, rollback=target.crop)
    controls = {
        name: state_difference(target, prompt_ids, block_size=block_size, seed=seed, rollback=rollback)
        for name, rollback in broken_rollbacks(target).items()
    }
    return StateProof(relative, controls, judged=target.head_weight.dtype == torch.float32)


def state_difference(target: Target, prompt_ids: Sequence[int], *, block_size: int, seed: int, rollback: Rollback) -> float:
    """Largest relative difference between a cache after random forced acceptances and a fresh one of the same tokens.

    Every run has a verification that accepts nothing, one that accepts everything, and others at random between.
    """
    generator = np.random.default_rng(seed)
    cache = target.new_cache()
    prefill(target, prompt_ids, cache)
    committed = list(prompt_ids)
    forced = [0, block_size, *generator.integers(1, block_size, size=STATE_ROUNDS - 2).tolist()]
    for kept in generator.permutation(forced).tolist():
        # A verification commits its anchor in any case, so at least one token of the block stays.
        kept_tokens = max(1, kept)
        block = generator.integers(0, target.info.vocab_size, size=block_size).tolist()
        feed(target, torch.tensor([block], device=target.device), cache)
        rollback(cache, block_size - kept_tokens)
        committed += block[:kept_tokens]
    fresh = target.new_cache()
    prefill(target, committed, fresh)
    return max(_layer_differences(cache, fresh))


def broken_rollbacks(target: Target) -> dict[str, Rollback]:
    """Negative controls: rollbacks with one mistake each, by name; `no_restore` only where there is a state to restore."""

    def no_crop(_cache: TargetCache, _remove: int) -> None:
        """Leaves the rejected tokens in."""

    def off_by_one(cache: TargetCache, remove: int) -> None:
        target.crop(cache, max(remove - 1, 0))

    def no_restore(cache: TargetCache, remove: int) -> None:
        before = [_copied(layer) for layer in cache.kv.layers]
        target.crop(cache, remove)
        for layer, states in zip(cache.kv.layers, before, strict=True):
            for tensor, dirty in zip(_linear_states(layer), states, strict=True):
                tensor.copy_(dirty)

    controls: dict[str, Rollback] = {"no_crop": no_crop, "crop_off_by_one": off_by_one}
    if any(hasattr(layer, "recurrent_states") for layer in target.new_cache().kv.layers):
        controls["no_restore"] = no_restore
    return controls


def _layer_differences(cache: TargetCache, fresh: TargetCache) -> Iterator[float]:
    yield 0.0 if cache.length_tokens == fresh.length_tokens else math.inf
    for layer, wanted in zip(cache.kv.layers, fresh.kv.layers, strict=True):
        for found, right in zip(_linear_states(layer), _linear_states(wanted), strict=True):
            yield _relative(found, right)
        if getattr(wanted, "keys", None) is not None:
            same_length = layer.get_seq_length() == wanted.get_seq_length()
            # A sliding layer may still hold positions that have left the window since; a fresh one never does.
            held = wanted.keys.shape[-2] if same_length else 0
            yield _relative(layer.keys[..., -held:, :], wanted.keys) if same_length else math.inf
            yield _relative(layer.values[..., -held:, :], wanted.values) if same_length else math.inf


def _linear_states(layer: object) -> list[Tensor]:
    """Convolution and recurrent states of a cache layer; none on attention layers."""
    groups = (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {}))
    return [state for group in groups for state in group.values() if state is not None]


def _copied(layer: object) -> list[Tensor]:
    return [state.clone() for state in _linear_states(layer)]


def _relative(found: Tensor, right: Tensor) -> float:
    if found.shape != right.shape:
        return math.inf
    difference = float((found.float() - right.float()).norm())
    scale = float(right.float().norm())
    value = difference / scale if scale > 0 else (0.0 if difference == 0 else math.inf)
    return value if math.isfinite(value) else math.inf
