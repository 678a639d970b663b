"""Drafters with different taps on one target: it taps what any of them reads, and each is given its own.

Dimensions: B rows, n tokens, M taps of the target, m of them a drafter's own, D width of a tap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from dflash.evaluate.proposal import Committed, Joining, Proposal, Proposer
from dflash.model.target import Target


def target_tapping(target: Target, layer_ids: Iterable[int]) -> Target:
    """The same weights with these taps besides its own; the target itself if it has them all."""
    wanted = sorted({*target.target_layer_ids, *layer_ids})
    return target if tuple(wanted) == target.target_layer_ids else Target(target.model, info=target.info, target_layer_ids=wanted)


def reading_own_taps(proposer: Proposer, *, own: Sequence[int], target: Target) -> Proposer:
    """The proposer on a target with more taps than it was made for.

    Args:
        proposer: reads features [B, n, m*D].
        own: its layer ids, all of them taps of the target.
        target: gives features [B, n, M*D].
    """
    return proposer if tuple(own) == target.target_layer_ids else _OwnTaps(proposer, own=own, tapped=target.target_layer_ids)


class _OwnTaps:
    """Hands on a proposer's own taps out of all."""

    needs_features = True

    def __init__(self, proposer: Proposer, *, own: Sequence[int], tapped: Sequence[int]) -> None:
        self._proposer = proposer
        self._places = [tapped.index(layer_id) for layer_id in own]
        self._taps = len(tapped)
        self.max_drafts = proposer.max_drafts

    def begin(self, keys: Sequence[str]) -> None:
        """Start with new rows."""
        self._proposer.begin(keys)

    def replace_rows(self, joining: Sequence[Joining]) -> None:
        """New rows join."""
        self._proposer.replace_rows([Joining(new.row, new.key, self._own(new.features)) for new in joining])

    def select_rows(self, rows: Sequence[int]) -> None:
        """Only these rows go on."""
        self._proposer.select_rows(rows)

    def propose(self, committed: Committed) -> Proposal:
        """Draft from its own taps."""
        return self._proposer.propose(Committed(committed.texts, committed.anchors, self._own(committed.features), committed.kept))

    def _own(self, features: Tensor | None) -> Tensor | None:
        if features is None:
            return None
        apart = features.view(*features.shape[:-1], self._taps, -1)
        return apart[..., self._places, :].flatten(-2)
