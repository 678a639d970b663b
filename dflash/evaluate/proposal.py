"""What passes between the decoding loop and whoever guesses the target's next tokens.

Dimensions: B rows, n tokens of the latest forward, k drafts, M*D width of the taps, V vocabulary.
Invariant: a proposer keeps nothing of a block that was judged; what it remembers of a row are committed tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Committed:
    """What is decided, as a proposer sees it before it drafts.

    Attributes:
        texts: prompt and committed tokens of each row; the last one is the anchor, which has no features yet.
        anchors: the anchors again, [B, 1], on the target's device.
        features: taps [B, n, M*D] of the latest forward; None unless `needs_features`.
        kept: how many of its first n positions are committed, for each row; they end right before the anchor. 0 in a row whose
            features were all given when it joined.
    """

    texts: Sequence[Sequence[int]]
    anchors: Tensor
    features: Tensor | None
    kept: Sequence[int]


class Joining(NamedTuple):
    """A prompt that takes the place of a row that has ended.

    Attributes:
        row: whose place.
        key: its name.
        features: taps [1, n, M*D] of its n tokens; None unless `needs_features`.
    """

    row: int
    key: str
    features: Tensor | None


class Proposal(NamedTuple):
    """Drafts [B, k] on the target's device.

    Attributes:
        counts: how many of a row's k are meant; None if all are.
        probabilities: [B, k, V] in float64, what each draft was drawn from; None if the drafts were not drawn at random.
    """

    tokens: Tensor
    counts: Sequence[int] | None
    probabilities: Tensor | None


class Proposer(Protocol):
    """Something that guesses the target's next tokens."""

    @property
    def max_drafts(self) -> int:
        """Most tokens of one proposal: block size - 1."""

    @property
    def needs_features(self) -> bool:
        """Whether the target's taps have to be copied for it."""

    def begin(self, keys: Sequence[str]) -> None:
        """Forget all rows and start with new ones, of the given names."""

    def replace_rows(self, joining: Sequence[Joining]) -> None:
        """New rows take the places of some that have ended; only where several rows began."""

    def propose(self, committed: Committed) -> Proposal:
        """Guess 0 to `max_drafts` tokens behind each row's anchor."""

    def select_rows(self, rows: Sequence[int]) -> None:
        """Only these rows go on, in this order."""
