"""Which drafts are accepted, and which token the target adds.

A deterministic draft is accepted iff it equals the token that the target chooses at its place, greedy or by its keyed
sample: lossless at any temperature, and the very sample that plain decoding gives. A draft that was drawn from q is accepted
with probability min(1, p/q), and the first refused one is replaced by a sample of max(p - q, 0), normalised: the committed
tokens follow p (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318), but are another sample than plain decoding's.

Dimensions: B rows, k drafts, V vocabulary; the target judges k + 1 positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash.errors import EvaluationError
from dflash.evaluate.proposal import Proposal
from dflash.model.sampling import Sampling, choose, inverse_cdf, keyed_uniforms, probabilities

Verdict = tuple[list[int], list[list[int]]]
"""Accepted drafts of each row, and the tokens that stand there: accepted ones, then the target's own."""


def judge(proposal: Proposal, logits: Tensor, sampling: Sampling, *, keys: Sequence[str], firsts: Sequence[int]) -> Verdict:
    """Judge a proposal by the target's logits.

    Args:
        proposal: drafts [B, k].
        logits: [B, k+1, V] behind the anchor and behind each draft.
        sampling: how the target chooses.
        keys: one name a row.
        firsts: position in the answer of each row's first draft.

    Returns:
        Accepted drafts of each row and, for each row, at least accepted + 1 tokens that may be committed.

    Raises:
        EvaluationError: drafts drawn at random for a greedy target.
    """
    if proposal.probabilities is not None:
        if sampling.greedy:
            raise EvaluationError(
                "drafts drawn at random cannot be judged at temperature 0", remedy="draw drafts only when the target samples too"
            )
        return _judge_drawn((proposal.tokens, proposal.probabilities), logits, sampling, keys, firsts)
    drafts = proposal.tokens.shape[1]
    choices = choose(logits, sampling, keys=keys, firsts=firsts)
    # One transfer: how far the drafts agree is decided here, not by a chain of single reads from the device.
    both = torch.cat((proposal.tokens, choices), dim=1).tolist()
    counts = proposal.counts if proposal.counts is not None else [drafts] * len(both)
    accepted = [agreeing_prefix(row[:count], row[drafts:]) for row, count in zip(both, counts, strict=True)]
    return accepted, [row[drafts:] for row in both]


def agreeing_prefix(proposed: Sequence[int], chosen: Sequence[int]) -> int:
    """Length of the longest common prefix: how many proposed tokens the target chose itself."""
    for index, (guess, choice) in enumerate(zip(proposed, chosen, strict=False)):
        if guess != choice:
            return index
    return min(len(proposed), len(chosen))


def _judge_drawn(
    drawn: tuple[Tensor, Tensor], logits: Tensor, sampling: Sampling, keys: Sequence[str], firsts: Sequence[int]
) -> Verdict:
    """Judge drafts [B, k] by what they were drawn from, [B, k, V]."""
    tokens, chances = drawn
    drafts = tokens.shape[1]
    wanted = probabilities(logits, sampling.temperature)
    chance = _at(wanted[:, :drafts], tokens) / _at(chances, tokens)
    uniforms = keyed_uniforms(sampling.seed, [f"{key}\0accept" for key in keys], firsts, drafts, device=logits.device)
    taken = (uniforms < chance).long().cumprod(dim=1).sum(dim=1)
    rows = torch.arange(len(keys), device=logits.device)
    # Behind the last draft nothing was drawn: q is zero there and the residual is the target's own distribution.
    padded = torch.cat((chances, torch.zeros_like(wanted[:, :1])), dim=1)
    target = wanted[rows, taken]
    residual = (target - padded[rows, taken]).clamp_(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target)
    replaced = [f"{key}\0replace" for key in keys]
    places = [first + accepted for first, accepted in zip(firsts, taken.tolist(), strict=True)]
    own = inverse_cdf(residual, keyed_uniforms(sampling.seed, replaced, places, 1, device=logits.device)[:, 0])
    both = torch.cat((tokens, own[:, None], taken[:, None]), dim=1).tolist()
    accepted = [row[-1] for row in both]
    return accepted, [[*row[:count], row[-2]] for row, count in zip(both, accepted, strict=True)]


def _at(values: Tensor, ids: Tensor) -> Tensor:
    return values.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
