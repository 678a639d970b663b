"""Prompt lookup: the drafter that costs nothing and that a trained one has to beat.

Source: Saxena, Prompt Lookup Decoding (2023); also `prompt_lookup_num_tokens` in transformers' generation.
"""

from __future__ import annotations

from collections.abc import Sequence


def lookup_continuation(tokens: Sequence[int], *, count: int, longest_ngram: int) -> list[int]:
    """Tokens that followed the latest earlier occurrence of the text's last n-gram, longest n first.

    Args:
        tokens: prompt and answer so far.
        count: tokens wanted at most.
        longest_ngram: n to start with; shorter ones are tried down to 1.

    Returns:
        1 to `count` tokens, or none if the last token never occurred before.
    """
    size = len(tokens)
    for length in range(min(longest_ngram, size - 1), 0, -1):
        suffix = list(tokens[size - length :])
        for begin in range(size - length - 1, -1, -1):
            if list(tokens[begin : begin + length]) == suffix:
                return list(tokens[begin + length : begin + length + count])
    return []
