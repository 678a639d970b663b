"""From characters to tokens: which tokens lie wholly inside a part of the rendered text.

Invariant: a token is inside [start, end) only if all its characters are; a token that reports its start behind its leading
space (some tokenizers do) owns that space all the same.
The price: the tokenizer's own look-up of a character at each edge, and a step or two from there, whatever the length of the text;
neither a Python list of all offsets nor a search through them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Set as AbstractSet

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding

Span = tuple[int, int]
"""Half-open range of characters or tokens."""


def token_span(encoding: Encoding, ids: npt.NDArray[np.int32], text: str, part: Span, added_ids: AbstractSet[int]) -> Span:
    """Tokens inside a part of the text, without white space that the template put behind the end of the turn.

    Args:
        encoding: of `text`, with character offsets, which ascend.
        ids: [n] the encoding's ids; asking the encoding for them makes a list of all of them each time.
        text: what was encoded.
        part: characters [start, end) of it.
        added_ids: ids of added tokens: never mere white space, whatever their text.

    Returns:
        Tokens [first, stop); empty if no token is inside.
    """
    first = _first_from(encoding, part[0])
    stop = max(first, _stop_at(encoding, part[1]))
    while stop > first and _is_filler(encoding, ids, text, stop - 1, added_ids):
        stop -= 1
    return first, stop


def merged(spans: list[Span]) -> tuple[Span, ...]:
    """Ascending spans without the empty ones; touching ones become one."""
    joined: list[Span] = []
    for start, end in spans:
        if start >= end:
            continue
        if joined and joined[-1][1] >= start:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return tuple(joined)


def _first_from(encoding: Encoding, character: int) -> int:
    """The first token that starts at a character or behind it."""
    near = encoding.char_to_token(character)
    if near is None:  # a character that no token claims (trimmed white space, or the end of the text)
        return bisect_left(range(len(encoding)), character, key=lambda token: _start(encoding, token))
    while near > 0 and _start(encoding, near - 1) >= character:
        near -= 1
    while near < len(encoding) and _start(encoding, near) < character:
        near += 1
    return near


def _stop_at(encoding: Encoding, character: int) -> int:
    """How many tokens end at a character or before it."""
    near = encoding.char_to_token(character - 1) if character > 0 else None
    if near is None:
        return bisect_right(range(len(encoding)), character, key=lambda token: _end(encoding, token))
    while near > 0 and _end(encoding, near - 1) > character:
        near -= 1
    while near < len(encoding) and _end(encoding, near) <= character:
        near += 1
    return near


def _start(encoding: Encoding, token: int) -> int:
    return min(_characters(encoding, token)[0], _end(encoding, token - 1) if token else 0)


def _end(encoding: Encoding, token: int) -> int:
    return _characters(encoding, token)[1]


def _characters(encoding: Encoding, token: int) -> Span:
    characters = encoding.token_to_chars(token)
    if characters is None:
        raise AssertionError("no padding was asked for, so every token has its characters")
    return characters


def _is_filler(encoding: Encoding, ids: npt.NDArray[np.int32], text: str, token: int, added_ids: AbstractSet[int]) -> bool:
    if text[_start(encoding, token) : _end(encoding, token)].strip():
        return False
    return int(ids[token]) not in added_ids
