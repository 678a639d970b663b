"""Who guesses the target's next tokens: the trained drafter, or a look into the text so far.

Invariant: a proposer keeps nothing of a block that was judged; what it remembers of a prompt are committed tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash.errors import EvaluationError
from dflash.evaluate.lookup import lookup_continuation
from dflash.model.drafter import Drafter
from dflash.model.target import Target

LOOKUP_NGRAM = 3
"""Longest n-gram that prompt lookup searches for, as in the method's own code."""


class DrafterProposer:
    """Drafts a block in one drafter forward by argmax of the target's head.

    Args:
        target: supplies embedding and head.
        drafter: in eval mode, on the target's device.
        block_size: K at decode, 2 to the trained block size: one anchor and K-1 drafts.
        mask_token_id: fills the slots behind the anchor.

    Raises:
        EvaluationError: a block larger than the trained one.
    """

    needs_features = True

    def __init__(self, target: Target, drafter: Drafter, *, block_size: int, mask_token_id: int) -> None:
        if not 2 <= block_size <= drafter.config.block_size:
            raise EvaluationError(
                f"block size {block_size} at decode does not fit a drafter trained with {drafter.config.block_size}",
                remedy=f"set evaluate.block_size to 2..{drafter.config.block_size}, or leave it out",
            )
        self._target = target
        self._drafter = drafter
        self._block = torch.full((1, block_size), mask_token_id, device=target.device)
        self._dtype = drafter.fc.weight.dtype
        self._cache = drafter.new_cache()

    @property
    def max_drafts(self) -> int:
        """Drafts of every proposal."""
        return self._block.shape[1] - 1

    def begin(self) -> None:
        """Start with an empty context cache."""
        self._cache = self._drafter.new_cache()

    def propose(self, tokens: Sequence[int], new_features: Tensor | None) -> Tensor:
        """Draft `[K-1]` tokens behind the anchor `tokens[-1]`; see `decode.Proposer`."""
        if new_features is None:
            raise TypeError("the drafter reads the target's taps; decode with a proposer whose needs_features is true")
        self._block[0, 0] = tokens[-1]
        embeds = self._target.embed(self._block).to(self._dtype)
        hidden = self._drafter.draft(embeds, new_features.to(self._dtype), self._cache, len(tokens) - 1)
        return self._target.logits(hidden[0, 1:].to(self._target.head_weight.dtype)).argmax(-1)


class LookupProposer:
    """Proposes what followed the latest earlier occurrence of the last few tokens.

    Args:
        target: whose device the proposals are needed on.
        block_size: K; up to K-1 tokens are proposed.
    """

    needs_features = False

    def __init__(self, target: Target, *, block_size: int) -> None:
        self._device = target.device
        self.max_drafts = block_size - 1

    def begin(self) -> None:
        """Nothing is remembered between calls."""

    def propose(self, tokens: Sequence[int], new_features: Tensor | None) -> Tensor:  # noqa: ARG002 (the proposers' interface)
        """Look up to `max_drafts` tokens up; see `decode.Proposer`."""
        found = lookup_continuation(tokens, count=self.max_drafts, longest_ngram=LOOKUP_NGRAM)
        return torch.tensor(found, dtype=torch.long, device=self._device)
