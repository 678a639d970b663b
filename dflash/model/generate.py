"""Batched on-policy generation: the target writes the answers that the drafter will learn to predict.

Invariant: a prompt's answer does not depend on the batch it is in (up to floating-point noise): every random number is keyed by
(seed, prompt key, position), and no row ever sees padding.
Hard decision: prompts are prefilled unpadded, those of equal length together, and their caches stacked so that all rows end
at the same column; from there on every step feeds one token to every unfinished row, and finished rows are dropped. Padding on
the left of a prefill is not exact on linear-attention targets. A batch costs one prefill a distinct length, so sort prompts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from dflash.errors import TargetError
from dflash.model.sampling import Sampling, choose, keyed_uniform
from dflash.model.target import Target

__all__ = ["generate_batch", "keyed_uniform"]


@torch.no_grad()
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
    for key, prompt in zip(keys, prompts, strict=True):
        if not prompt:
            raise TargetError(f"prompt {key!r} is empty", remedy="give every prompt at least one token")
    answers: list[list[int]] = [[] for _ in prompts]
    if not answers:
        return answers
    sampling = Sampling(temperature, seed)
    logits, _, cache = target.prefill(prompts, with_taps=False)
    rows = list(range(len(prompts)))
    length = 0
    while True:
        chosen = choose(logits.unsqueeze(1), sampling, keys=[keys[row] for row in rows], firsts=[length] * len(rows))
        tokens = chosen[:, 0].tolist()
        length += 1
        going = []
        for place, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            answers[row].append(token)
            if length < max_new_tokens and token not in stop_ids:
                going.append(place)
        if not going:
            return answers
        if len(going) < len(rows):
            rows = [rows[place] for place in going]
            cache.select_rows(going)
            chosen = chosen[going]
        logits = target.logits_cached(chosen, cache)[:, -1]
