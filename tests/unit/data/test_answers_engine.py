"""Engines: batches of similar length, nobody waits for ever, and answers with or without the stop token behind them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data.answers_engine import Answer, InProcessAnswerer, Question, _nearest, answer_from_ids
from dflash.errors import TargetError

STOP = 99


def question(number: int, length: int) -> Question:
    return Question(f"d{number}", f"k{number}", [number] * length)


def echo(prompts: list[list[int]], keys: list[str]) -> list[list[int]]:
    """Says its first token, then stops; an odd one is cut."""
    return [[prompt[0], prompt[0]] if prompt[0] % 2 else [prompt[0], STOP] for prompt in prompts]


def engine(batch_size: int, batches: list[list[int]]) -> InProcessAnswerer:
    def generate(prompts: list[list[int]], keys: list[str]) -> list[list[int]]:
        batches.append([len(prompt) for prompt in prompts])
        assert keys == [f"k{prompt[0]}" for prompt in prompts]
        return echo(prompts, keys)

    return InProcessAnswerer(generate, batch_size=batch_size, stop_ids=[STOP])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), batch_size=st.integers(1, 9))
def test_every_question_is_answered_once_in_full_batches(lengths: list[int], batch_size: int) -> None:
    batches: list[list[int]] = []
    answers: dict[str, Answer] = {}
    with engine(batch_size, batches).session() as session:
        for number, length in enumerate(lengths):
            session.submit(question(number, length))
        while len(answers) < len(lengths):
            replies = session.collect()
            assert len(replies) == min(batch_size, len(lengths) - len(answers))
            for reply in replies:
                assert reply.question.digest not in answers
                assert isinstance(reply.outcome, Answer)
                answers[reply.question.digest] = reply.outcome
    for number in range(len(lengths)):
        cut = number % 2
        ids = [number, number] if cut else [number]
        wanted = Answer(ids, "length" if cut else "stop", None if cut else STOP, generated_ids=True, tokens=2)
        assert answers[f"d{number}"] == wanted
    assert sorted(length for batch in batches for length in batch) == sorted(lengths)


def test_the_one_that_waits_longest_is_never_passed_over(
) -> None:  # fmt: skip
    batches: list[list[int]] = []
    with engine(2, batches).session() as session:
        session.submit(question(0, 500))
        for number in range(1, 20):
            session.submit(question(number, 5))
        assert "d0" in {reply.question.digest for reply in session.collect()}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12).map(sorted), count=st.integers(1, 6), data=st.data())
def test_the_nearest_lengths_are_chosen(lengths: list[int], count: int, data: st.DataObject) -> None:
    around = data.draw(st.integers(0, len(lengths) - 1))
    start, stop = _nearest(lengths, around=around, count=count)
    assert stop - start == min(count, len(lengths))
    assert 0 <= start <= around < stop <= len(lengths)
    farthest = max(abs(length - lengths[around]) for length in lengths[start:stop])
    outside = [abs(length - lengths[around]) for length in (*lengths[:start], *lengths[stop:])]
    assert all(distance >= farthest for distance in outside)


@pytest.mark.parametrize(
    ("ids", "stop_id", "wanted"),
    [
        ([1, 2, 9], None, Answer([1, 2], "stop", 9, generated_ids=True, tokens=3)),
        ([1, 2], 9, Answer([1, 2], "stop", 9, generated_ids=True, tokens=3)),
        ([1, 2], None, Answer([1, 2], "stop", None, generated_ids=True, tokens=3)),
        ([1, 9, 9], 9, Answer([1, 9], "stop", 9, generated_ids=True, tokens=3)),
        ([9], None, Answer([], "stop", 9, generated_ids=True, tokens=1)),
        ([], None, Answer([], "stop", None, generated_ids=True, tokens=1)),
    ],
)
def test_a_server_may_or_may_not_return_the_stop_token(ids: list[int], stop_id: int | None, wanted: Answer) -> None:
    assert answer_from_ids(ids, finish_reason="stop", stop_ids=frozenset({8, 9}), stop_id=stop_id) == wanted


def test_a_cut_answer_keeps_all_its_ids() -> None:
    answer = answer_from_ids([1, 2], finish_reason="length", stop_ids=frozenset({9}), stop_id=None)
    assert answer == Answer([1, 2], "length", None, generated_ids=True, tokens=2)


def test_an_answer_that_ends_at_a_foreign_stop_token_is_another_models() -> None:
    with pytest.raises(TargetError, match=r"token 7.*\[8, 9\]"):
        answer_from_ids([1, 2], finish_reason="stop", stop_ids=frozenset({8, 9}), stop_id=7)
