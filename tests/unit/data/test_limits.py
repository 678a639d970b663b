"""The limit on length: pure policies over ids and spans, against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data.limits import apply_limit, sample_ids
from dflash.data.quarantine import BadRowError
from dflash.data.render import Rendered

Spans = tuple[tuple[int, int], ...]


def sample(length: int, *spans: tuple[int, int]) -> Rendered:
    return Rendered(np.arange(length, dtype=np.int32), spans, turns=2)


def pieces(rendered: Rendered, limit: int) -> list[tuple[int, int, Spans]]:
    """Where each piece begins and ends in the original, and its spans."""
    limited = apply_limit(rendered, limit=limit, policy="split")
    return [(int(each.input_ids[0]), int(each.input_ids[-1]) + 1, each.loss_spans) for each in limited.samples]


@pytest.mark.parametrize("policy", ["error", "drop", "truncate", "split"])
def test_a_sample_within_the_limit_is_left_alone(policy: str) -> None:
    whole = sample(10, (4, 10))
    limited = apply_limit(whole, limit=10, policy=policy)  # type: ignore[arg-type]
    assert limited.samples == (whole,)
    assert limited.dropped_tokens == 0


@pytest.mark.parametrize("policy", ["error", "drop"])
def test_a_longer_one_is_refused_with_both_numbers(policy: str) -> None:
    with pytest.raises(BadRowError, match=r"over_long: the sample has 11 tokens, the limit is 10"):
        apply_limit(sample(11, (4, 11)), limit=10, policy=policy)  # type: ignore[arg-type]


def test_truncation_keeps_the_beginning() -> None:
    limited = apply_limit(sample(20, (4, 8), (9, 18)), limit=10, policy="truncate")
    assert limited.samples[0] == sample(10, (4, 8), (9, 10))
    assert limited.dropped_tokens == 10


@pytest.mark.parametrize("policy", ["truncate", "split", "error"])
def test_nothing_to_learn_is_refused_whatever_the_policy(policy: str) -> None:
    with pytest.raises(BadRowError, match="no_supervised_pair"):
        apply_limit(sample(8, (4, 5), (6, 7)), limit=10, policy=policy)  # type: ignore[arg-type]
    with pytest.raises(BadRowError, match="no_supervised_pair"):
        apply_limit(sample(30), limit=10, policy="split")
    with pytest.raises(BadRowError, match="no_supervised_pair"):
        apply_limit(sample(30, (20, 28)), limit=10, policy="truncate")


class TestSplit:
    def test_a_piece_ends_behind_an_answer_so_that_the_next_begins_with_its_question(self) -> None:
        assert pieces(sample(24, (3, 8), (11, 16), (19, 24)), 10) == [(0, 8, ((3, 8),)), (8, 16, ((3, 8),)), (16, 24, ((3, 8),))]

    def test_as_many_turns_as_fit_stay_together(self) -> None:
        assert pieces(sample(24, (3, 8), (11, 16), (19, 24)), 17) == [(0, 16, ((3, 8), (11, 16))), (16, 24, ((3, 8),))]

    def test_an_answer_behind_a_long_prompt_keeps_as_much_of_it_as_fits(self) -> None:
        assert pieces(sample(30, (24, 30)), 10) == [(20, 30, ((4, 10),))]
        assert apply_limit(sample(30, (24, 30)), limit=10, policy="split").dropped_tokens == 20

    def test_an_answer_longer_than_the_limit_is_cut_and_keeps_half_of_it_for_the_prompt(self) -> None:
        assert pieces(sample(40, (20, 40)), 10) == [(15, 25, ((5, 10),)), (25, 35, ((0, 10),)), (35, 40, ((0, 5),))]

    def test_a_tail_without_answers_is_lost(self) -> None:
        limited = apply_limit(sample(30, (2, 8)), limit=10, policy="split")
        assert [len(each) for each in limited.samples] == [8]
        assert limited.dropped_tokens == 22


@st.composite
def samples(draw: st.DrawFn) -> Rendered:
    cuts = sorted(draw(st.sets(st.integers(0, 60), max_size=10)))
    spans = tuple(zip(cuts[::2], cuts[1::2], strict=False))
    end = max(cuts, default=0)
    return sample(end + draw(st.integers(1, 10)), *spans)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(rendered=samples(), limit=st.integers(2, 25))
def test_pieces_are_parts_of_the_sample_and_no_pair_is_lost_without_need(rendered: Rendered, limit: int) -> None:
    mask = rendered.loss_mask
    pairs = {at for at in range(len(rendered) - 1) if mask[at] and mask[at + 1]}
    try:
        limited = apply_limit(rendered, limit=limit, policy="split")
    except BadRowError:
        assert not pairs
        return
    end = 0
    kept: set[int] = set()
    for piece in limited.samples:
        start = int(piece.input_ids[0])
        assert start >= end, "pieces ascend and do not overlap"
        end = start + len(piece)
        assert len(piece) <= limit
        assert piece.has_pair
        assert piece.input_ids.tolist() == list(range(start, end))
        assert piece.loss_mask.tolist() == mask[start:end].tolist()
        kept |= {start + at for at in range(len(piece) - 1) if piece.loss_mask[at] and piece.loss_mask[at + 1]}
    assert limited.dropped_tokens == len(rendered) - sum(map(len, limited.samples))
    long_answers = [(start, stop) for start, stop in rendered.loss_spans if stop - start > limit]
    lost = pairs - kept
    assert all(any(start <= at < stop for start, stop in long_answers) for at in lost), "only answers above the limit are cut"
    # A cut parts one pair; a last piece of a single token has none to keep.
    assert len(lost) <= sum(-(-(stop - start) // (limit - limit // 2)) for start, stop in long_answers)


def test_ids_of_pieces() -> None:
    assert sample_ids("a", 1) == ["a"]
    assert sample_ids("a", 3) == ["a#1", "a#2", "a#3"]
