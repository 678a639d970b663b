"""Who guesses the target's next tokens: the trained drafter, or a look into the text so far."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash.errors import EvaluationError
from dflash.evaluate.lookup import lookup_continuation
from dflash.evaluate.proposal import Committed, Joining, Proposal
from dflash.model.drafter import Drafter
from dflash.model.ragged_draft import RaggedContext, draft_ragged, refill_ragged
from dflash.model.sampling import Sampling, greedy_choice, inverse_cdf, keyed_uniforms, probabilities
from dflash.model.screened_head import ScreenedHead, screening_pays
from dflash.model.target import Target

LOOKUP_NGRAM = 3
"""Longest n-gram that prompt lookup searches for, as in the method's own code."""


class DrafterProposer:
    """Drafts a block in one drafter forward: the most probable token of each slot, or one drawn from the slot's distribution.

    Args:
        target: supplies embedding and head.
        drafter: in eval mode, on the target's device.
        block_size: K at decode, 2 to the trained block size: one anchor and K-1 drafts.
        mask_token_id: fills the slots behind the anchor.
        drawing: how drafts are drawn from the drafter's distribution; greedy takes the most probable ones.

    Raises:
        EvaluationError: a block larger than the trained one.
    """

    needs_features = True

    def __init__(self, target: Target, drafter: Drafter, *, block_size: int, mask_token_id: int, drawing: Sampling) -> None:
        if not 2 <= block_size <= drafter.config.block_size:
            raise EvaluationError(
                f"block size {block_size} at decode does not fit a drafter trained with {drafter.config.block_size}",
                remedy=f"set evaluate.block_size to 2..{drafter.config.block_size}, or leave it out",
            )
        self._target = target
        self._drafter = drafter
        self._drawing = drawing
        self._masks = torch.full((1, block_size - 1), mask_token_id, device=target.device)
        self._dtype = drafter.fc.weight.dtype
        self._screened = ScreenedHead(target.head_weight) if drawing.greedy and screening_pays(target.head_weight) else None
        self._keys: list[str] = []
        self._alone = drafter.new_cache()
        self._ragged: RaggedContext | None = None

    @property
    def max_drafts(self) -> int:
        """Drafts of every proposal."""
        return self._masks.shape[1]

    def begin(self, keys: Sequence[str]) -> None:
        """Start with empty contexts; one row has the simpler cache of `Drafter.draft`."""
        self._keys = list(keys)
        self._alone = self._drafter.new_cache()
        self._ragged = RaggedContext(len(keys)) if len(keys) > 1 else None

    def replace_rows(self, joining: Sequence[Joining]) -> None:
        """Read the features of prompts that join; only where several rows began."""
        if self._ragged is None:
            raise TypeError("no row can join a single one: its context has no rows")
        for new in joining:
            if new.features is None:
                raise TypeError("the drafter reads the target's taps; decode with a proposer whose needs_features is true")
            self._keys[new.row] = new.key
            refill_ragged(self._drafter, new.features.to(self._dtype), self._ragged, row=new.row)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Drop the other rows' contexts."""
        self._keys = [self._keys[row] for row in rows]
        if self._ragged is not None:
            self._ragged.select_rows(rows)

    def propose(self, committed: Committed) -> Proposal:
        """Draft [B, K-1] tokens; see `proposal.Proposer`."""
        if committed.features is None:
            raise TypeError("the drafter reads the target's taps; decode with a proposer whose needs_features is true")
        block = torch.cat((committed.anchors, self._masks.expand(len(self._keys), -1)), dim=1)
        embeds = self._target.embed(block).to(self._dtype)
        hidden = self._hidden(embeds, committed.features.to(self._dtype), committed)
        slots = hidden[:, 1:].to(self._target.head_weight.dtype)
        if self._screened is not None:
            return Proposal(self._screened.argmax(slots.flatten(0, 1)).view(slots.shape[:2]), None, None)
        logits = self._target.logits(slots)
        if self._drawing.greedy:
            return Proposal(greedy_choice(logits), None, None)
        chances = probabilities(self._target.logit_rule.apply(logits), self._drawing.temperature)
        firsts = [len(text) for text in committed.texts]
        drawn = [f"{key}\0draft" for key in self._keys]
        uniforms = keyed_uniforms(self._drawing.seed, drawn, firsts, self.max_drafts, device=logits.device)
        return Proposal(inverse_cdf(chances, uniforms), None, chances)

    def _hidden(self, embeds: Tensor, features: Tensor, committed: Committed) -> Tensor:
        if self._ragged is not None:
            return draft_ragged(self._drafter, embeds, features, self._ragged, committed.kept)
        return self._drafter.draft(embeds, features, self._alone, len(committed.texts[0]) - 1)


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

    def begin(self, keys: Sequence[str]) -> None:
        """Nothing is remembered between calls."""

    def replace_rows(self, joining: Sequence[Joining]) -> None:
        """Nothing is remembered between calls."""

    def select_rows(self, rows: Sequence[int]) -> None:
        """Nothing is remembered between calls."""

    def propose(self, committed: Committed) -> Proposal:
        """Look up to `max_drafts` tokens up for each row; see `proposal.Proposer`."""
        found = [lookup_continuation(text, count=self.max_drafts, longest_ngram=LOOKUP_NGRAM) for text in committed.texts]
        return padded_proposal(found, device=self._device)


class OracleProposer:
    """Proposes known answers with keyed mistakes: a drafter of known quality, for proofs and benchmarks.

    Args:
        target: whose device the proposals are needed on.
        answers: the target's own answer by row key.
        prompt_tokens: length of each row's prompt by key.
        max_drafts: K - 1.
        right_frac: chance of each draft to be the target's own token, independently.
        seed: of the mistakes, keyed by row and position.
    """

    needs_features = False

    def __init__(
        self, target: Target, answers: dict[str, Sequence[int]], prompt_tokens: dict[str, int], *, max_drafts: int,
        right_frac: float, seed: int,
    ) -> None:  # fmt: skip
        self._target = target
        self._answers = answers
        self._prompt_tokens = prompt_tokens
        self._right_frac = right_frac
        self._seed = seed
        self._keys: list[str] = []
        self.max_drafts = max_drafts

    def begin(self, keys: Sequence[str]) -> None:
        """Answer these rows."""
        self._keys = list(keys)

    def replace_rows(self, joining: Sequence[Joining]) -> None:
        """Answer these rows from now on."""
        for new in joining:
            self._keys[new.row] = new.key

    def select_rows(self, rows: Sequence[int]) -> None:
        """Answer only these rows."""
        self._keys = [self._keys[row] for row in rows]

    def propose(self, committed: Committed) -> Proposal:
        """The next tokens of each row's answer, each wrong with its own chance."""
        drafts = []
        for key, text in zip(self._keys, committed.texts, strict=True):
            first = len(text) - self._prompt_tokens[key]
            uniforms = keyed_uniforms(self._seed, [key], [first], self.max_drafts, device=torch.device("cpu"))[0].tolist()
            right = [*self._answers[key][first : first + self.max_drafts]]
            right += [0] * (self.max_drafts - len(right))
            vocabulary = self._target.info.vocab_size
            drafts.append(
                [
                    token if number < self._right_frac else (token + 1) % vocabulary
                    for token, number in zip(right, uniforms, strict=True)
                ]
            )
        return Proposal(torch.tensor(drafts, device=self._target.device), None, None)


def padded_proposal(drafts: Sequence[Sequence[int]], *, device: torch.device) -> Proposal:
    """Drafts of different numbers as one rectangle; the filler is never judged."""
    longest = max(len(row) for row in drafts)
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in drafts], dtype=torch.long, device=device)
    return Proposal(tokens.reshape(len(drafts), longest), [len(row) for row in drafts], None)
