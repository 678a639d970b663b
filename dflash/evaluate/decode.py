"""Greedy decoding of one prompt, plain and speculative, on the same target cache.

Invariant (temperature 0): both return the same tokens, up to near-ties of the floating-point kernels; the contract and
its proof are in `lossless`. Nothing behind the first stop id or the length limit is returned.

The speculative loop knows no drafter: a proposer offers up to K-1 tokens after the last one (the anchor), the target
judges anchor and proposal in one forward, the longest agreeing prefix and the target's own next token are committed, and
the target's cache is rolled back to the committed tokens. The last committed token is always the next anchor: it has no
cache entry and no features yet.

Times: the prefill and its first token are left out on both sides; the drafter's own pass over the prompt's features is
part of the first draft and counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dflash.model.target import Target
from dflash.model.target_cache import TargetCache

Rollback = Callable[[TargetCache, int], None]
"""Takes the last n tokens of the latest forward out of the cache (`Target.crop`)."""


class Proposer(Protocol):
    """Something that guesses the target's next tokens."""

    @property
    def max_drafts(self) -> int:
        """Most tokens of one proposal: block size - 1."""

    @property
    def needs_features(self) -> bool:
        """Whether the target's taps have to be copied for it."""

    def begin(self) -> None:
        """Forget the previous prompt."""

    def propose(self, tokens: Sequence[int], new_features: Tensor | None) -> Tensor:
        """Guess what follows.

        Args:
            tokens: prompt and committed tokens; the last one is the anchor.
            new_features: taps [1, n, M*D] of the positions committed since the last call, up to the anchor's predecessor;
                None unless `needs_features`.

        Returns:
            0 to `max_drafts` token ids, `[k]`, on the target's device.
        """


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Where an answer ends: at the first of `stop_ids` (which is kept), or after `max_new_tokens`."""

    max_new_tokens: int
    stop_ids: frozenset[int]

    def reaching(self, new: Sequence[int], *, have: int) -> tuple[int, bool]:
        """How many of the `new` tokens reach an answer that holds `have` already, and whether it ends with them."""
        room = self.max_new_tokens - have
        for index, token in enumerate(new[:room]):
            if token in self.stop_ids:
                return index + 1, True
        return min(len(new), room), len(new) >= room


@dataclass(frozen=True, slots=True)
class Verification:
    """One target forward over a block.

    Attributes:
        context_tokens: tokens in front of the anchor.
        drafted: proposed tokens; accepted: of these, the longest prefix that the target chose itself.
        counted: tokens that reached the answer, 1..accepted+1.
    """

    context_tokens: int
    drafted: int
    accepted: int
    counted: int

    @property
    def committed(self) -> int:
        """Accepted drafts and the target's own token, whether or not they reach the answer."""
        return self.accepted + 1


@dataclass(frozen=True, slots=True)
class PlainTrace:
    """One token a target forward."""

    tokens: tuple[int, ...]
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class SpeculativeTrace:
    """What one prompt gave; `tokens` starts with the prefill's own token, which no verification made."""

    tokens: tuple[int, ...]
    verifications: tuple[Verification, ...]
    prefill_s: float
    decode_s: float


@torch.inference_mode()
def plain_decode(target: Target, prompt_ids: Sequence[int], *, limits: DecodeLimits) -> PlainTrace:
    """Greedy decoding, one token a forward.

    Args:
        target: frozen target.
        prompt_ids: token ids, at least one.
        limits: where the answer ends.

    Returns:
        The answer with its times.
    """
    started_s = _now_s(target)
    cache = target.new_cache()
    logits, _ = prefill(target, prompt_ids, cache)
    choice = logits.argmax(-1, keepdim=True)
    tokens = [int(choice)]
    prefilled_s = _now_s(target)
    ended = limits.reaching(tokens, have=0)[1]
    while not ended:
        choice = feed(target, choice, cache)[:, -1].argmax(-1, keepdim=True)
        token = int(choice)
        ended = limits.reaching([token], have=len(tokens))[1]
        tokens.append(token)
    return PlainTrace(tuple(tokens), prefilled_s - started_s, _now_s(target) - prefilled_s)


@torch.inference_mode()
def speculative_decode(
    target: Target, proposer: Proposer, prompt_ids: Sequence[int], *, limits: DecodeLimits, rollback: Rollback
) -> SpeculativeTrace:
    """Greedy decoding by blocks, lossless for any proposer.

    Args:
        target: frozen target.
        proposer: guesses the tokens after an anchor.
        prompt_ids: token ids, at least one.
        limits: where the answer ends.
        rollback: `target.crop`; anything else is a negative control.

    Returns:
        The answer, one `Verification` a target forward, and times.
    """
    started_s = _now_s(target)
    proposer.begin()
    cache = target.new_cache()
    features: Tensor | None
    logits, features = prefill(target, prompt_ids, cache)
    tokens = [*prompt_ids, int(logits.argmax())]
    prefilled_s = _now_s(target)
    verifications: list[Verification] = []
    ended = limits.reaching(tokens[-1:], have=0)[1]
    while not ended:
        context_tokens = len(tokens) - 1
        drafts = proposer.propose(tokens, features)
        anchor = torch.tensor(tokens[-1:], device=target.device)
        block = torch.cat([anchor, drafts])[None]
        logits, features = _feed_tapped(target, block, cache, proposer)
        choices = logits[0].argmax(-1)
        # One transfer: how far the drafts agree is decided here, not by a chain of single reads from the device.
        proposed, chosen = torch.stack([torch.cat([drafts, choices[-1:]]), choices]).tolist()
        accepted = agreeing_prefix(proposed[:-1], chosen)
        rollback(cache, len(chosen) - accepted - 1)
        features = None if features is None else features[:, : accepted + 1]
        counted, ended = limits.reaching(chosen[: accepted + 1], have=len(tokens) - len(prompt_ids))
        tokens += chosen[:counted]
        verifications.append(Verification(context_tokens, len(proposed) - 1, accepted, counted))
    answer = tuple(tokens[len(prompt_ids) :])
    return SpeculativeTrace(answer, tuple(verifications), prefilled_s - started_s, _now_s(target) - prefilled_s)


def agreeing_prefix(proposed: Sequence[int], chosen: Sequence[int]) -> int:
    """Length of the longest common prefix: how many proposed tokens the target chose itself."""
    for index, (guess, choice) in enumerate(zip(proposed, chosen, strict=False)):
        if guess != choice:
            return index
    return min(len(proposed), len(chosen))


def prefill(target: Target, prompt_ids: Sequence[int], cache: TargetCache) -> tuple[Tensor, Tensor]:
    """Logits [1, V] of the prompt's last token and its taps [1, P, M*D]."""
    ids = torch.tensor([list(prompt_ids)], device=target.device)
    return target.forward_cached_last(ids, cache, _positions(ids, cache))


def feed(target: Target, ids: Tensor, cache: TargetCache) -> Tensor:
    """Logits [1, n, V] of the tokens [1, n] that follow what the cache holds."""
    return target.logits_cached(ids, cache, _positions(ids, cache))


def _feed_tapped(target: Target, ids: Tensor, cache: TargetCache, proposer: Proposer) -> tuple[Tensor, Tensor | None]:
    """Logits and, where the proposer reads them, taps."""
    if proposer.needs_features:
        return target.forward_cached(ids, cache, _positions(ids, cache))
    return feed(target, ids, cache), None


def _positions(ids: Tensor, cache: TargetCache) -> Tensor:
    return torch.arange(cache.length_tokens, cache.length_tokens + ids.shape[1], device=ids.device)[None]


def _now_s(target: Target) -> float:
    """Clock reading after everything queued on the target's device has run."""
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()
