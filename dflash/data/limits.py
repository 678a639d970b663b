"""Samples above the length limit: refuse, cut off, or split into pieces. Pure functions.

Invariant: every piece has at most `limit` tokens and two consecutive supervised tokens; pieces ascend and do not overlap; a
supervised token is in at most one of them.
Hard decision of `split`: a piece ends behind an answer wherever one ends within the limit, so that no pair of neighbouring
supervised tokens is parted and the next piece begins with the next question. Where none does, the piece begins as early as
lets the whole answer in (the oldest part of its prompt is lost); an answer longer than the limit keeps half of the limit for
its prompt at most, and is cut, which loses one pair a cut. What the later pieces no longer see is the price: the drafter
learns from the target's states on a shortened context, as with truncation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from dflash.data.quarantine import BadRowError
from dflash.data.render import Rendered
from dflash.data.render_spans import Span

_LIKE_A_PIECE = re.compile(r"#\d+#*\Z")

OverLong = Literal["error", "drop", "truncate", "split"]


@dataclass(frozen=True, slots=True)
class Limited:
    """What is left of a sample.

    Attributes:
        samples: usable, in order; never empty.
        dropped_tokens: tokens of the sample that are in none of them.
    """

    samples: tuple[Rendered, ...]
    dropped_tokens: int


def apply_limit(rendered: Rendered, *, limit: int, policy: OverLong) -> Limited:
    """Bring a sample under the length limit.

    Args:
        rendered: any sample.
        limit: tokens that a sample may have.
        policy: for longer samples; `error` and `drop` refuse them alike here, the quarantine tells them apart.

    Raises:
        BadRowError: too long by policy, or nothing is left that could be learnt from.
    """
    if len(rendered) <= limit:
        pieces = [(0, len(rendered))]
    elif policy == "truncate":
        pieces = [(0, limit)]
    elif policy == "split":
        pieces = _pieces(rendered.loss_spans, len(rendered), limit)
    else:
        raise BadRowError("over_long", f"the sample has {len(rendered)} tokens, the limit is {limit}", origin="sample")
    cut = [_cut(rendered, piece) for piece in pieces] if len(rendered) > limit else [rendered]
    samples = tuple(piece for piece in cut if piece.has_pair)
    if not samples:
        detail = f"{rendered.supervised} supervised tokens of {len(rendered)}, no two in a row within {limit} tokens"
        raise BadRowError("no_supervised_pair", detail, origin="sample")
    return Limited(samples, len(rendered) - sum(len(sample) for sample in samples))


def sample_ids(conversation_id: str, count: int) -> list[str]:
    """Ids of the samples that a conversation became: its own, or with `#1`, `#2`, ... behind it.

    An id that looks like that already (`x#1`) is told from a piece of `x` by another `#` behind it.
    """
    own = f"{conversation_id}#" if _LIKE_A_PIECE.search(conversation_id) else conversation_id
    return [own] if count == 1 else [f"{own}#{number}" for number in range(1, count + 1)]


def qualified_id(conversation_id: str, *, label: str, row: str) -> str:
    """A conversation's id that is unique in a data set whose sources have unique labels without a slash.

    Args:
        conversation_id: unique inside its source.
        label: of the source.
        row: number of the row there; an id that was made of the two is qualified as it is.
    """
    return conversation_id if conversation_id == f"{label}:{row}" else f"{label}/{conversation_id}"


def _pieces(spans: tuple[Span, ...], length: int, limit: int) -> list[Span]:
    """Token ranges of the pieces; what lies between them is lost."""
    pieces: list[Span] = []
    start = 0
    while length - start > limit:
        ahead = [span for span in spans if span[1] > start]
        if not ahead:
            return pieces  # only unsupervised tokens are left
        ends = [end for _, end in ahead if end <= start + limit]
        if not ends:
            start = max(start, _late_start(ahead[0], limit))
        end = ends[-1] if ends else min(start + limit, ahead[0][1])
        pieces.append((start, end))
        start = end
    return [*pieces, (start, length)]


def _late_start(answer: Span, limit: int) -> int:
    """The earliest start of a piece that holds the whole answer, or leaves half of it to the answer."""
    begin, end = answer
    return end - limit if end - begin <= limit else begin - limit // 2


def _cut(rendered: Rendered, piece: Span) -> Rendered:
    start, end = piece
    spans = ((max(first, start) - start, min(last, end) - start) for first, last in rendered.loss_spans)
    inside = tuple((first, last) for first, last in spans if first < last)
    return Rendered(rendered.input_ids[start:end], inside, rendered.turns)
