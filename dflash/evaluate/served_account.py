"""From an engine's accounts to the figures of an evaluation. Pure; no network.

Invariant: what the engine tells is reconciled with the answer it gave before it is used. An answer of n tokens has n-1 that came
from verifications; an engine that counts a+1 tokens for each of v verifications may tell more (drafts behind the answer's
end), at most one block more, and less only by forwards for which it had nothing drafted: those are verifications of no draft.
Hard decision: nothing is spread over prompts or positions that the engine did not name. Three levels of detail are kept apart:
every verification, one account an answer, one account of all answers; what a level cannot give is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash.errors import EvaluationError
from dflash.evaluate.bootstrap import IntArray, ratio_interval
from dflash.evaluate.metrics import VerificationTable, verification_table
from dflash.evaluate.served_replies import Drafting, ServedReply


@dataclass(frozen=True, slots=True)
class Account:
    """Verifications of one answer, or of all answers together, reconciled.

    Attributes:
        verifications: target forwards behind the prefill, those without a draft included.
        counted: tokens of them that reached the answers.
        drafted, accepted: of the proposals; drafts behind an answer's end are counted.
        cut: how many answers ended inside accepted drafts; None where that cannot be told.
        histogram: verifications by accepted drafts, or None.
        steps: (drafted, accepted) of each in their order, or None.
    """

    verifications: int
    counted: int
    drafted: int
    accepted: int
    cut: int | None
    histogram: tuple[int, ...] | None
    steps: tuple[tuple[int, int], ...] | None


def reconcile(drafting: Drafting, *, answers: int, completion_tokens: int, positions: int, what: str) -> Account:
    """Compare an engine's account with the answers that it belongs to.

    Args:
        drafting: of one answer, or of all of them.
        answers: how many.
        completion_tokens: their tokens together.
        positions: drafts of a proposal at most.
        what: names them, for errors.

    Raises:
        EvaluationError: they cannot belong to each other.
    """
    counted = completion_tokens - answers
    told = drafting.accepted + drafting.verifications
    beyond = told - counted
    drafted = drafting.drafted if drafting.drafted is not None else drafting.verifications * positions
    blocks_wrong = drafting.accepted > drafted or drafted > drafting.verifications * positions
    if beyond > answers * positions or blocks_wrong:
        raise EvaluationError(
            f"{what}: the engine tells of {drafting.verifications} verifications with {drafting.accepted} of {drafted} drafts "
            f"accepted, which does not fit {completion_tokens} tokens and blocks of {positions} drafts",
            remedy="nobody else may use the server during an evaluation; docs/evaluation.md says which versions are known",
        )
    undrafted = max(0, -beyond)
    histogram, steps = drafting.histogram, drafting.steps
    if histogram is not None and any(histogram[positions + 1 :]):
        raise EvaluationError(
            f"{what}: the engine tells of {len(histogram) - 1} accepted drafts in a block of {positions}",
            remedy="docs/evaluation.md says which versions are known",
        )
    if histogram is not None:
        histogram = histogram[: positions + 1]
        padded = [*histogram, *[0] * (positions + 1 - len(histogram))]
        padded[0] += undrafted
        histogram = tuple(padded)
    cut = int(beyond > 0) if answers == 1 else (0 if beyond <= 0 else None)
    return Account(
        verifications=drafting.verifications + undrafted,
        counted=counted,
        drafted=drafted,
        accepted=drafting.accepted,
        cut=cut,
        histogram=histogram,
        steps=None if undrafted else steps,
    )


def steps_table(replies: Sequence[ServedReply], accounts: Sequence[Account]) -> VerificationTable | None:
    """One row a verification; None unless every answer names them all.

    Raises:
        EvaluationError: an answer's verifications do not lead to its length.
    """
    if any(account.steps is None for account in accounts):
        return None
    rows = []
    for index, (reply, account) in enumerate(zip(replies, accounts, strict=True)):
        context, left = reply.prompt_tokens, account.counted
        for drafted, accepted in account.steps or ():
            counted = min(accepted + 1, left)
            if counted < 1:
                raise EvaluationError(
                    f"answer {index + 1} has {reply.completion_tokens} tokens, and the engine lists verifications behind its end",
                    remedy="docs/evaluation.md says which versions are known",
                )
            rows.append((index, context, drafted, accepted, counted))
            context, left = context + accepted + 1, left - counted
    return verification_table(rows)


def figures_of_answers(accounts: Sequence[Account], *, counts: IntArray, confidence: float) -> dict[str, Any]:
    """Figures from one account an answer; fields of `EvaluationResult`."""
    counted = np.array([account.counted for account in accounts])
    passes = np.array([account.verifications for account in accounts])
    decoded = passes > 0
    # An answer that ended inside accepted drafts has a last verification without a token of the target's own.
    accepted = int(counted.sum() - passes.sum()) + sum(account.cut or 0 for account in accounts)
    return {
        **figures_of_all(pooled(accounts)),
        "accepted": accepted,
        "accepted_length": accepted / int(passes.sum()),
        "acceptance_length_macro": float((counted[decoded] / passes[decoded]).mean()),
        "acceptance_ci": ratio_interval(counted, passes, counts=counts, confidence=confidence),
    }


def figures_of_all(account: Account) -> dict[str, Any]:
    """Figures from one account of all answers; fields of `EvaluationResult`."""
    verifications = account.verifications
    accepted = None if account.cut is None else account.counted - verifications + account.cut
    return {
        "verifications": verifications,
        "drafted": account.drafted,
        "accepted": accepted,
        "committed_tokens": account.counted,
        "acceptance_length": account.counted / verifications,
        "acceptance_length_untruncated": 1 + account.accepted / verifications,
        "accepted_length": None if accepted is None else accepted / verifications,
        "acceptance_length_macro": None,
        "acceptance_ci": None,
        "survival_per_position": None,
        "conditional_per_position": None,
        "acceptance_histogram": None,
        "survival_untruncated_per_position": _survival(account.histogram),
    }


def pooled(accounts: Sequence[Account]) -> Account:
    """All answers' accounts as one."""
    histograms = [account.histogram for account in accounts if account.histogram is not None]
    cuts = [account.cut for account in accounts if account.cut is not None]
    whole = len(histograms) == len(accounts)
    return Account(
        verifications=sum(account.verifications for account in accounts),
        counted=sum(account.counted for account in accounts),
        drafted=sum(account.drafted for account in accounts),
        accepted=sum(account.accepted for account in accounts),
        cut=sum(cuts) if len(cuts) == len(accounts) else None,
        histogram=tuple(sum(column) for column in zip(*histograms, strict=True)) if whole else None,
        steps=None,
    )


def _survival(histogram: tuple[int, ...] | None) -> tuple[float, ...] | None:
    """Share of verifications with at least k accepted drafts, k = 1, 2, ..."""
    if histogram is None:
        return None
    total = sum(histogram)
    return tuple(sum(histogram[k:]) / total for k in range(1, len(histogram)))
