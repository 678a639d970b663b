"""What lossless means: the same tokens as plain decoding, and what may excuse a difference.

Contract:
1. *State*: see `state_proof`.
2. *Tokens*: speculative and plain decoding return the same tokens. Feeding K tokens at once rounds differently from
   feeding one (1e-5 on dense models, up to 1e-3 on hybrids), and so does another number of rows; a difference is excused only
   as a near-tie: at every token of the speculative answer the target's preference for another token, measured by feeding that
   answer one token at a time, is within `near_tie_factor` times the largest logit difference between feeding it singly and in
   blocks, two paths that are both correct and never roll back. Where tokens are sampled, logits are replaced by cumulative
   probabilities, and the preference by the distance of the position's random number from the part that the token owns.
   With experts there is a second kind: a router that led by less than `ROUTER_TIE` up to the first difference may have chosen
   another expert.

Outside float32 equality is not promised: the number of differing prompts is reported and the state test is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.evaluate.decode import DecodeLimits
from dflash.evaluate.routing import ROUTER_TIE, router_gap
from dflash.model.sampling import Sampling, keyed_uniforms, probabilities
from dflash.model.target import Target

MAX_ROUNDING_FRAC = 1e-2
"""A difference between two correct float32 paths above this share of the largest logit is no rounding: nothing is excused."""


@dataclass(frozen=True, slots=True)
class NearTie:
    """Why an answer that differs from plain decoding is, or is not, excused.

    Attributes:
        position: first differing token of the answer.
        margin: largest preference of the target for another token than the answer's, at `position` or behind it: a difference of
            logits, or of cumulative probabilities where tokens are sampled.
        rounding: largest difference of the same kind between feeding the answer singly and in blocks.
        router_gap: smallest lead of a chosen expert over a refused one up to `position`; infinite without experts.
        excused: `margin <= near_tie_factor * rounding` or a router's near-tie, and the answer ends where it may.
    """

    position: int
    margin: float
    rounding: float
    router_gap: float
    excused: bool


@torch.inference_mode()
def explain_difference(
    target: Target,
    prompt_ids: Sequence[int],
    *,
    answers: tuple[Sequence[int], Sequence[int]],
    limits: DecodeLimits,
    sampling: Sampling,
    key: str,
    block_size: int,
    near_tie_factor: float,
) -> NearTie:
    """Judge an answer that differs from plain decoding by the near-tie rule of the contract.

    Args:
        target: frozen target.
        prompt_ids: what both answered.
        answers: the plain and the speculative one.
        limits: where answers may end.
        sampling: how their tokens were chosen.
        key: name that the samples were keyed by.
        block_size: tokens of one verification.
        near_tie_factor: accepted preference, in units of the rounding.
    """
    plain, speculative = answers
    singly = teacher_forced_logits(target, prompt_ids, speculative, chunk_tokens=1)
    blocks = teacher_forced_logits(target, prompt_ids, speculative, chunk_tokens=block_size)
    margins, rounding, scale = _margins(singly, blocks, speculative, sampling, key)
    position = next(
        (index for index, (a, b) in enumerate(zip(plain, speculative, strict=False)) if a != b), min(len(plain), len(speculative))
    )
    margin = float(margins[position:].max()) if position < len(speculative) else math.inf
    rounds_only = singly.dtype != torch.float32 or rounding <= MAX_ROUNDING_FRAC * scale
    whole = bool(speculative) and limits.reaching(speculative, have=0) == (len(speculative), True)
    gap = router_gap(target, prompt_ids, speculative[: position + 1])
    tied = margin <= near_tie_factor * rounding and rounds_only
    excused = math.isfinite(margin) and whole and (tied or gap < ROUTER_TIE)
    return NearTie(position, margin, rounding, gap, excused)


def _margins(
    singly: Tensor, blocks: Tensor, answer: Sequence[int], sampling: Sampling, key: str
) -> tuple[Tensor, float, float]:  # fmt: skip
    """How far each token of an answer is from being chosen, [T]; the rounding of that quantity, and its largest value."""
    chosen = torch.tensor(list(answer), device=singly.device)[:, None]
    if sampling.greedy:
        margins = singly.max(dim=-1).values - singly.gather(1, chosen)[:, 0]
        return margins, float((singly - blocks).abs().max()), float(singly.abs().max())
    chances = probabilities(singly, sampling.temperature)
    cdf = chances.cumsum(-1)
    upper = cdf.gather(1, chosen)[:, 0]
    lower = upper - chances.gather(1, chosen)[:, 0]
    points = keyed_uniforms(sampling.seed, [key], [0], len(answer), device=singly.device)[0] * cdf[:, -1]
    margins = torch.maximum(lower - points, points - upper).clamp_(min=0)
    rounding = float((cdf - probabilities(blocks, sampling.temperature).cumsum(-1)).abs().max())
    return margins, rounding, 1.0


def teacher_forced_logits(target: Target, prompt_ids: Sequence[int], answer: Sequence[int], *, chunk_tokens: int) -> Tensor:
    """Logits that predict each token of a given answer, fed `chunk_tokens` at a time and never rolled back.

    Returns:
        `[T, V]` in the target's dtype; row t predicts `answer[t]`.
    """
    first, _, cache = target.prefill([prompt_ids], with_taps=False)
    rows = [first]
    for begin in range(0, len(answer) - 1, chunk_tokens):
        ids = torch.tensor([list(answer[begin : min(begin + chunk_tokens, len(answer) - 1)])], device=target.device)
        rows.append(target.logits_cached(ids, cache)[0])
    return torch.cat(rows)
