"""From an engine's accounts to figures: exact where the account says enough, absent where it does not, refused where it lies."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.errors import EvaluationError
from dflash.evaluate.bootstrap import resample_counts
from dflash.evaluate.metrics import acceptance_metrics, survival_untruncated, verification_table
from dflash.evaluate.served_account import Account, figures_of_all, figures_of_answers, pooled, reconcile, steps_table
from dflash.evaluate.served_replies import Drafting, ServedReply

POSITIONS = 4
Steps = list[int]


@st.composite
def answers(draw: st.DrawFn) -> list[tuple[Steps, int]]:
    """For each answer the accepted drafts of its verifications, and how many tokens lie behind its end."""
    made = []
    for _ in range(draw(st.integers(1, 6))):
        steps = draw(st.lists(st.integers(0, POSITIONS), min_size=0, max_size=6))
        made.append((steps, draw(st.integers(0, steps[-1])) if steps else 0))
    return made


def told(steps: Steps) -> Drafting:
    histogram = tuple(steps.count(n) for n in range(POSITIONS + 1))
    return Drafting(len(steps), POSITIONS * len(steps), sum(steps), histogram, tuple((POSITIONS, n) for n in steps))


def reply(steps: Steps, beyond: int, *, prompt: int = 7) -> ServedReply:
    tokens = 1 + sum(n + 1 for n in steps) - beyond
    return ServedReply(tuple(range(tokens)), "", prompt, tokens, True, None, told(steps))


def accounts(made: list[tuple[Steps, int]]) -> list[Account]:
    return [
        reconcile(
            told(steps), answers=1, completion_tokens=reply(steps, beyond).completion_tokens, positions=POSITIONS, what="it"
        )
        for steps, beyond in made
    ]  # fmt: skip


@settings(max_examples=40, deadline=None, derandomize=True)
@given(answers())
def test_accounts_give_what_single_verifications_give(made: list[tuple[Steps, int]]) -> None:
    """Brute force: the verifications themselves, with the last one of each answer cut where the answer ends."""
    rows = []
    for prompt, (steps, beyond) in enumerate(made):
        context = 7
        for place, accepted in enumerate(steps):
            last = place == len(steps) - 1
            rows.append((prompt, context, POSITIONS, accepted, accepted + 1 - (beyond if last else 0)))
            context += accepted + 1
    if not rows:
        return
    table = verification_table(rows)
    counts = resample_counts(len(made), samples=20, seed=1)
    wanted = asdict(acceptance_metrics(table, prompts=len(made), positions=POSITIONS, counts=counts, confidence=0.9))
    found = accounts(made)
    rebuilt = steps_table([reply(*each) for each in made], found)
    assert rebuilt is not None
    assert [getattr(rebuilt, name).tolist() for name in ("prompt", "context_tokens", "drafted", "accepted", "counted")] == [
        getattr(table, name).tolist() for name in ("prompt", "context_tokens", "drafted", "accepted", "counted")
    ]
    figures = figures_of_answers(found, counts=counts, confidence=0.9)
    absent = {"survival_per_position", "conditional_per_position", "acceptance_histogram"}
    for name, value in figures.items():
        if name == "survival_untruncated_per_position":
            assert value == pytest.approx(survival_untruncated(table, positions=POSITIONS))
        elif name in absent:
            assert value is None
        else:
            assert value == (wanted[name] if wanted[name] is None else pytest.approx(wanted[name], nan_ok=True)), name


@settings(max_examples=30, deadline=None, derandomize=True)
@given(answers())
def test_one_account_of_all_gives_the_pooled_figures_and_no_other(made: list[tuple[Steps, int]]) -> None:
    if not any(steps for steps, _ in made):
        return
    each = accounts(made)
    whole = [n for steps, _ in made for n in steps]
    tokens = sum(reply(*one).completion_tokens for one in made)
    together = reconcile(told(whole), answers=len(made), completion_tokens=tokens, positions=POSITIONS, what="all")
    beyond = sum(one for _, one in made)
    assert replace(together, steps=None, cut=None) == replace(pooled(each), cut=None)
    figures = figures_of_all(together)
    assert figures["acceptance_length"] == pooled(each).counted / len(whole)
    assert figures["acceptance_ci"] is None and figures["acceptance_length_macro"] is None
    # How many answers ended inside accepted drafts is known if none did, or if there is only one.
    assert (figures["accepted"] is None) == (beyond > 0 and len(made) > 1)


def test_a_forward_without_drafts_is_a_verification_that_committed_one_token() -> None:
    found = reconcile(told([2, 0]), answers=1, completion_tokens=1 + 4 + 3, positions=POSITIONS, what="it")
    assert (found.verifications, found.counted, found.drafted, found.cut) == (5, 7, 8, 0)
    assert found.histogram == (4, 0, 1, 0, 0)
    assert found.steps is None, "where in the answer they were nobody told"
    assert figures_of_all(found)["acceptance_length"] == 7 / 5
    assert steps_table([reply([2, 0], 0)], [found]) is None


@pytest.mark.parametrize(
    ("drafting", "tokens"),
    [
        (told([4, 4]), 5),  # six tokens behind the end: more than a block
        (Drafting(2, 9, 1, None, None), 3),  # more drafts than two blocks hold
        (Drafting(2, 1, 2, None, None), 4),  # more accepted than drafted
    ],
)
def test_an_account_of_something_else_is_refused(drafting: Drafting, tokens: int) -> None:
    with pytest.raises(EvaluationError, match="the answer to 'q': the engine tells of 2 verifications"):
        reconcile(drafting, answers=1, completion_tokens=tokens, positions=POSITIONS, what="the answer to 'q'")


def test_a_histogram_is_as_long_as_the_blocks_or_refused() -> None:
    """Some engines leave room for more accepted drafts than a block has."""
    roomy = replace(told([2, 0]), histogram=(1, 0, 1, 0, 0, 0, 0))
    each = [
        reconcile(drafting, answers=1, completion_tokens=5, positions=POSITIONS, what="it") for drafting in (roomy, told([2, 0]))
    ]
    assert each[0].histogram == (1, 0, 1, 0, 0) and pooled(each).histogram == (2, 0, 2, 0, 0)
    beyond = Drafting(2, 8, 6, (1, 0, 0, 0, 0, 0, 1), None)
    with pytest.raises(EvaluationError, match="6 accepted drafts in a block of 4"):
        reconcile(beyond, answers=1, completion_tokens=9, positions=POSITIONS, what="it")


def test_one_answer_has_a_length_and_no_interval() -> None:
    found = accounts([([2, 0], 0), ([], 0)])
    figures = figures_of_answers(found, counts=resample_counts(2, samples=20, seed=1), confidence=0.9)
    assert figures["acceptance_length"] == 2.0 and figures["acceptance_ci"] is None


def test_verifications_behind_an_answers_end_are_refused() -> None:
    found = reconcile(told([3, 0]), answers=1, completion_tokens=4, positions=POSITIONS, what="it")
    with pytest.raises(EvaluationError, match="verifications behind its end"):
        steps_table([replace(reply([3, 0], 0), completion_tokens=4)], [found])


def test_drafts_that_nobody_counted_are_whole_blocks() -> None:
    found = reconcile(Drafting(3, None, 2, None, None), answers=1, completion_tokens=6, positions=POSITIONS, what="it")
    assert found.drafted == 12 and figures_of_all(found)["survival_untruncated_per_position"] is None
