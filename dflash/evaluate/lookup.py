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
    text, size = list(tokens), len(tokens)
    # Only where the last token stood before can an n-gram end: one pass over the text instead of one for each n.
    ends = [end for end in range(size - 1, 0, -1) if text[end - 1] == text[-1]]
    for length in range(min(longest_ngram, size - 1), 0, -1):
        suffix = text[size - length :]
        for end in ends:
            if end >= length and text[end - length : end] == suffix:
                return text[end : end + count]
    return []
