"""What is evaluated: a labelled proposer, trained or not."""

from __future__ import annotations

from dataclasses import dataclass

from dflash.evaluate.proposal import Proposer
from dflash.evaluate.proposers import DrafterProposer, LookupProposer
from dflash.model.drafter import Drafter
from dflash.model.sampling import GREEDY
from dflash.model.target import Target


@dataclass(frozen=True, slots=True)
class Candidate:
    """One contestant of an evaluation.

    Attributes:
        label: name in results, e.g. `trained`.
        step: optimizer step of its weights; None if it has none.
        proposer: guesses tokens.
    """

    label: str
    step: int | None
    proposer: Proposer


def drafter_candidate(
    target: Target, drafter: Drafter, *, block_size: int | None, mask_token_id: int, label: str, step: int | None
) -> Candidate:
    """A drafter at some step of its training.

    Args:
        target: supplies embedding and head.
        drafter: its weights, in eval mode.
        block_size: block size at decode (`evaluate.block_size`); the trained one if None.
        mask_token_id: fills the slots behind the anchor.
        label: name in results.
        step: optimizer step of the weights; None if they have none.

    Raises:
        EvaluationError: a block larger than the trained one.
    """
    size = drafter.config.block_size if block_size is None else block_size
    proposer = DrafterProposer(target, drafter, block_size=size, mask_token_id=mask_token_id, drawing=GREEDY)
    return Candidate(label, step, proposer)


def lookup_candidate(target: Target, *, block_size: int) -> Candidate:
    """Prompt lookup with the same number of drafts, the baseline without any training."""
    return Candidate("prompt_lookup", None, LookupProposer(target, block_size=block_size))
