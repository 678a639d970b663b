"""The statistic of a comparison: right about runs of known quality, silent where there is nothing to tell."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.compare.contest import MIN_PAIRS, PromptScore, differences, interval, pooled


def scores(rates: np.ndarray, *, seed: int, passes: int = 60, name: str = "p", kind: str = "sums") -> list[PromptScore]:
    """Each prompt accepts geometrically at its own rate, block size 8."""
    generator = np.random.default_rng(seed)
    found = []
    for index, rate in enumerate(rates):
        drafts = np.minimum(generator.geometric(1 - rate, size=passes) - 1, 7)
        found.append(PromptScore(f"{name}{index}", kind, int((drafts + 1).sum()), passes))
    return found


def rates(*, seed: int, count: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.2, 0.9, size=count)


def test_a_run_against_itself_shows_no_difference() -> None:
    same = scores(rates(seed=1), seed=2)
    (whole,) = differences(same, same, confidence=0.95, seed=0)
    assert (whole.difference, whole.low, whole.high) == (0.0, 0.0, 0.0)
    assert (whole.word, whole.chance) == ("no difference", 1.0)


def test_a_small_gain_on_the_same_prompts_is_seen_though_the_runs_own_intervals_overlap() -> None:
    easy = rates(seed=1)
    before, after = scores(easy, seed=2), scores(np.minimum(easy + 0.04, 0.95), seed=3)
    (paired,) = differences(before, after, confidence=0.95, seed=0)
    renamed = [PromptScore(f"other-{s.prompt_hash}", s.kind, s.tokens, s.verifications) for s in after]
    (unpaired,) = differences(before, renamed, confidence=0.95, seed=0)
    assert paired.paired and not unpaired.paired
    assert paired.word == "better" and unpaired.word == "no difference"
    assert paired.difference == pytest.approx(pooled(after) - pooled(before)) == pytest.approx(unpaired.difference)
    assert (unpaired.high - unpaired.low) > 3 * (paired.high - paired.low)


def test_a_prompt_that_a_set_asks_twice_is_a_pair_with_its_own_double() -> None:
    easy = scores(rates(seed=7, count=10), seed=8)
    double = PromptScore(easy[0].prompt_hash, "sums", 240, 60)
    (whole,) = differences([*easy, double], [*easy, double], confidence=0.95, seed=0)
    assert (whole.prompts, whole.difference, whole.low, whole.high) == (11, 0.0, 0.0, 0.0)


def test_turns_of_one_conversation_are_drawn_together() -> None:
    easy = np.repeat(rates(seed=3, count=16), 2)
    alone = scores(easy, seed=4), scores(easy * 0.9, seed=5)
    together = [[replace(each, drawn_as=f"c{place // 2}") for place, each in enumerate(run)] for run in alone]
    (apart,) = differences(*alone, confidence=0.95, seed=0)
    (joint,) = differences(*together, confidence=0.95, seed=0)
    assert (joint.prompts, joint.difference) == (apart.prompts, apart.difference)
    assert joint.high - joint.low > 1.1 * (apart.high - apart.low)
    assert interval(together[0][:2], confidence=0.95, seed=0) is None, "two turns of one conversation"


def test_better_turned_round_is_worse() -> None:
    easy = rates(seed=4)
    a, b = scores(easy, seed=5), scores(np.minimum(easy + 0.1, 0.95), seed=6)
    (there,), (back,) = differences(a, b, confidence=0.95, seed=0), differences(b, a, confidence=0.95, seed=0)
    assert (there.word, back.word) == ("better", "worse")
    assert back.difference == pytest.approx(-there.difference)
    assert (back.low, back.high) == pytest.approx((-there.high, -there.low))


def test_equal_drafters_are_called_different_as_rarely_as_the_confidence_says() -> None:
    wrong = 0
    for trial in range(60):
        easy = rates(seed=trial, count=40)
        (whole,) = differences(scores(easy, seed=1000 + trial), scores(easy, seed=2000 + trial), confidence=0.95, seed=trial)
        wrong += whole.word != "no difference"
    assert wrong <= 8, "a binomial of 60 at 0.05 exceeds 8 once in a thousand times"


def test_a_handful_of_prompts_decides_nothing() -> None:
    few = rates(seed=7, count=MIN_PAIRS - 1)
    (whole,) = differences(scores(few * 0.2, seed=8), scores(np.full(len(few), 0.9), seed=9), confidence=0.95, seed=0)
    assert whole.low > 0 and whole.word == "no difference"


def test_the_turns_of_a_handful_of_conversations_decide_nothing_either() -> None:
    easy = rates(seed=7, count=2 * (MIN_PAIRS - 1))
    runs = scores(easy * 0.2, seed=8), scores(np.full(len(easy), 0.9), seed=9)
    turns = [[replace(each, drawn_as=f"c{place // 2}") for place, each in enumerate(run)] for run in runs]
    (apart,) = differences(*runs, confidence=0.95, seed=0)
    (joint,) = differences(*turns, confidence=0.95, seed=0)
    assert (apart.word, apart.apart, joint.apart, joint.prompts) == ("better", len(easy), MIN_PAIRS - 1, len(easy))
    assert joint.low > 0 and joint.word == "no difference"


def test_only_common_prompts_count_and_kinds_are_judged_apart() -> None:
    hard, easy = np.full(20, 0.3), np.full(20, 0.8)
    a = scores(hard, seed=1, name="h") + scores(easy, seed=2, name="e", kind="lists") + scores(easy, seed=3, name="only-a")
    b = scores(hard, seed=4, name="h") + scores(easy * 0.6, seed=5, name="e", kind="lists")
    found = {each.kind: each for each in differences(a, b, confidence=0.95, seed=0)}
    assert found.keys() == {"all", "sums", "lists"}
    assert found["all"].prompts == 40 and found["sums"].prompts == 20
    assert (found["sums"].word, found["lists"].word) == ("no difference", "worse")


def test_nothing_evaluated_gives_no_difference_at_all() -> None:
    assert differences([], scores(rates(seed=1), seed=1), confidence=0.95, seed=0) == ()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 50)), min_size=MIN_PAIRS, max_size=30), st.integers(0, 9))
def test_the_difference_lies_in_its_interval_and_the_order_of_prompts_is_nothing(pairs: list[tuple[int, int]], seed: int) -> None:
    a = [PromptScore(f"p{i}", "k", tokens + passes, passes) for i, (tokens, passes) in enumerate(pairs)]
    b = [PromptScore(f"p{i}", "k", tokens + 2 * passes, passes) for i, (tokens, passes) in enumerate(pairs)]
    (whole,) = differences(a, b, confidence=0.9, seed=seed)
    assert whole.low <= whole.difference + 1e-9 and whole.difference - 1e-9 <= whole.high
    assert whole.difference == pytest.approx(1.0)
    (shuffled,) = differences(a, list(reversed(b)), confidence=0.9, seed=seed)
    assert shuffled == whole
