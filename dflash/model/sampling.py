"""Choosing tokens from logits: greedy, or sampled with random numbers that are keyed, never drawn from a stream.

Invariant: the number that decides a row's token depends on (seed, the row's key, the token's position in the answer) alone, so a
sample depends neither on the batch it is in nor on how many tokens are verified at once: plain and speculative decoding
of one prompt return the same sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: 0 is greedy, otherwise sampling from softmax(logits / temperature).
        seed: of the keyed random numbers; greedy choices use none.
    """

    temperature: float
    seed: int

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is chosen."""
        return self.temperature == 0.0


GREEDY = Sampling(temperature=0.0, seed=0)


def keyed_uniform(seed: int, key: str, position: int) -> float:
    """A number in [0, 1) that depends on (seed, key, position) alone."""
    digest = hashlib.blake2b(f"{seed}\0{key}\0{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def keyed_uniforms(seed: int, keys: Sequence[str], firsts: Sequence[int], count: int, *, device: torch.device) -> Tensor:
    """Numbers [B, count] in float64: row r has those of positions firsts[r] onwards."""
    rows = [
        [keyed_uniform(seed, key, position) for position in range(first, first + count)]
        for key, first in zip(keys, firsts, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64, device=device).reshape(len(rows), count)


def greedy_choice(logits: Tensor) -> Tensor:
    """Ids [...] of the largest logits [..., V], the first of equals."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        # On a CPU numpy's is vectorized: 16 rows of 32,000 take 0.03 ms instead of 0.43.
        return torch.from_numpy(np.asarray(logits.detach().numpy().argmax(-1)))
    return logits.argmax(-1)


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) in float64, [..., V]."""
    return torch.softmax(logits.double() / temperature, dim=-1)


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Ids [...] with probability proportional to weights [..., V], at uniform numbers [...] in [0, 1)."""
    cdf = weights.cumsum(-1)
    points = uniforms.unsqueeze(-1) * cdf[..., -1:]
    return torch.searchsorted(cdf, points, right=True).squeeze(-1).clamp_(max=weights.shape[-1] - 1)


def choose(logits: Tensor, sampling: Sampling, *, keys: Sequence[str], firsts: Sequence[int]) -> Tensor:
    """The tokens that follow each of several positions.

    Args:
        logits: [B, n, V], the model's own (scaled and capped).
        sampling: greedy or sampled.
        keys: one name a row.
        firsts: position in the answer of each row's first chosen token; the others follow.

    Returns:
        Ids [B, n].
    """
    if sampling.greedy:
        return greedy_choice(logits)
    uniforms = keyed_uniforms(sampling.seed, keys, firsts, logits.shape[1], device=logits.device)
    return inverse_cdf(probabilities(logits, sampling.temperature), uniforms)
