from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.evaluate.lookup import lookup_continuation


def brute_force(tokens: list[int], count: int, longest: int) -> list[int]:
    for n in range(longest, 0, -1):
        places = [i for i in range(len(tokens) - n) if tokens[i : i + n] == tokens[len(tokens) - n :]] if n < len(tokens) else []
        if places:
            return tokens[places[-1] + n : places[-1] + n + count]
    return []


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), max_size=14), st.integers(1, 5), st.integers(1, 4))
def test_the_continuation_is_that_of_the_latest_longest_match(tokens: list[int], count: int, longest: int) -> None:
    found = lookup_continuation(tokens, count=count, longest_ngram=longest)
    assert found == brute_force(tokens, count, longest)
    assert len(found) <= count


def test_a_longer_match_wins_over_a_later_shorter_one() -> None:
    tokens = [7, 1, 2, 9, 5, 2, 8, 1, 2]
    assert lookup_continuation(tokens, count=2, longest_ngram=2) == [9, 5]
    assert lookup_continuation(tokens, count=2, longest_ngram=1) == [8, 1]


def test_nothing_is_proposed_for_a_token_that_never_occurred() -> None:
    assert lookup_continuation([1, 2, 3], count=4, longest_ngram=3) == []
    assert lookup_continuation([], count=4, longest_ngram=3) == []
