"""Batched on-policy generation: the target writes the answers that the drafter will learn to predict.

Invariant: a prompt's answer does not depend on the batch it is in (up to floating-point noise): every random number is keyed by
(seed, prompt key, position), and no row ever sees padding.
Hard decision: rows are aligned at their first token and none is padded, because padding on the left is not exact on
linear-attention targets and a KV cache has one length for all rows. Each step feeds as many tokens as the row with the fewest
unfed tokens has: first the shortest prompt's length, then mostly one, while rows with longer prompts feed their own prompt.
So batch prompts of similar lengths: a batch costs about (longest - shortest prompt) extra one-token steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflash.errors import TargetError
from dflash.model.target import Target


@dataclass(slots=True)
class _Row:
    """One unfinished prompt: its known tokens (prompt and answer) and its answer so far."""

    index: int
    key: str
    known: list[int]
    answer: list[int] = field(default_factory=list)


def generate_batch(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    keys: Sequence[str],
    max_new_tokens: int,
    temperature: float,
    seed: int,
    stop_ids: Collection[int],
) -> list[list[int]]:
    """Let the target answer prompts of any lengths.

    Args:
        target: the target.
        prompts: token ids of each prompt, at least one each.
        keys: one name a prompt; samples are keyed by it.
        max_new_tokens: longest answer.
        temperature: 0 is greedy, otherwise sampling from softmax(logits / temperature).
        seed: of the samples.
        stop_ids: tokens that end an answer.

    Returns:
        New tokens of each prompt, with the stop token if one was reached and nothing behind it.

    Raises:
        TargetError: a prompt is empty.
    """
    rows = [_Row(index, key, list(prompt)) for index, (key, prompt) in enumerate(zip(keys, prompts, strict=True))]
    answers: list[list[int]] = [row.answer for row in rows]
    for row in rows:
        if not row.known:
            raise TargetError(f"prompt {row.key!r} is empty", remedy="give every prompt at least one token")
    cache, fed = target.new_cache(), 0
    while rows:
        step = min(len(row.known) for row in rows) - fed
        new = torch.tensor([row.known[fed : fed + step] for row in rows], device=target.device)
        positions = torch.arange(fed, fed + step, device=target.device).expand(len(rows), -1)
        logits, _ = target.forward_cached_last(new, cache, positions)
        fed += step
        ready = [number for number, row in enumerate(rows) if len(row.known) == fed]
        for number, token in zip(ready, _choose(logits, rows, ready, temperature, seed), strict=True):
            rows[number].known.append(token)
            rows[number].answer.append(token)
        going = [number for number, row in enumerate(rows) if not _finished(row, max_new_tokens, stop_ids)]
        if len(going) < len(rows):
            rows = [rows[number] for number in going]
            if rows:
                cache.select_rows(torch.tensor(going, device=target.device))
    return answers


def _finished(row: _Row, max_new_tokens: int, stop_ids: Collection[int]) -> bool:
    return bool(row.answer) and (len(row.answer) >= max_new_tokens or row.answer[-1] in stop_ids)


def _choose(logits: Tensor, rows: list[_Row], ready: list[int], temperature: float, seed: int) -> list[int]:
    """The next token of every ready row: the largest logit, or the inverse of the CDF at the row's keyed uniform number."""
    if not ready:
        return []
    scores = logits if len(ready) == len(rows) else logits[ready]
    if temperature == 0:
        greedy: list[int] = scores.argmax(-1).tolist()
        return greedy
    uniforms = [keyed_uniform(seed, rows[number].key, len(rows[number].answer)) for number in ready]
    cdf = torch.softmax(scores.double() / temperature, dim=-1).cumsum(-1)
    points = torch.tensor(uniforms, dtype=torch.float64, device=cdf.device).unsqueeze(1) * cdf[:, -1:]
    sampled: list[int] = torch.searchsorted(cdf, points, right=True).clamp_(max=cdf.shape[1] - 1).squeeze(1).tolist()
    return sampled


def keyed_uniform(seed: int, key: str, position: int) -> float:
    """A number in [0, 1) that depends on (seed, key, position) alone."""
    digest = hashlib.blake2b(f"{seed}\0{key}\0{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53
