"""The synthetic generator: reproducible, right answers, and held-out prompts that training can never see."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data.synthetic import (
    TASK_KINDS,
    SyntheticConversation,
    generate_conversations,
    normalise_prompt,
    prompt_hash,
    split_of,
)
from dflash.data.synthetic.conversation import Split
from dflash.errors import DataError
from tests.unit.data.synthetic_oracle import CHECKS, check_arithmetic, check_some

SPLITS: tuple[Split, Split] = ("train", "heldout")


def user_turns(chat: SyntheticConversation) -> list[str]:
    return [content for role, content in chat.messages if role == "user"]


def chats(seed: int, count: int, split: Split, *kinds: str) -> list[SyntheticConversation]:
    return list(generate_conversations(seed=seed, count=count, split=split, kinds=kinds or None))


def turns_of(chat: SyntheticConversation) -> list[tuple[str, str]]:
    contents = [content for role, content in chat.messages if role != "system"]
    return list(zip(contents[::2], contents[1::2], strict=True))


def test_same_seed_gives_the_same_conversations_and_another_seed_gives_others() -> None:
    assert chats(3, 60, "train") == chats(3, 60, "train")
    assert chats(3, 60, "train") != chats(4, 60, "train")


def test_a_shorter_request_is_a_prefix_of_a_longer_one() -> None:
    assert chats(3, 100, "heldout")[:25] == chats(3, 25, "heldout")


def test_ids_are_unique_over_splits_and_seeds() -> None:
    ids = [chat.id for seed in (1, 11) for split in SPLITS for chat in chats(seed, 50, split)]
    assert len(set(ids)) == len(ids)


def test_every_kind_occurs_and_a_choice_of_kinds_is_kept() -> None:
    assert {chat.kind for chat in chats(1, 300, "train")} == set(TASK_KINDS)
    assert {chat.kind for chat in chats(1, 100, "train", "sorting", "letters")} == {"sorting", "letters"}


@pytest.mark.parametrize("kinds", [("sortin",), ()])
def test_unknown_or_missing_kinds_are_refused(kinds: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match="choose from arithmetic"):
        next(generate_conversations(seed=1, count=1, split="train", kinds=kinds))


def test_messages_alternate_after_an_optional_system_turn_and_convert_to_template_input() -> None:
    with_system = 0
    for chat in chats(2, 400, "train"):
        roles = [role for role, _ in chat.messages]
        with_system += roles[0] == "system"
        spoken = roles[1:] if roles[0] == "system" else roles
        assert spoken == ["user", "assistant"] * (len(spoken) // 2)
        assert (len(spoken) > 2) == (chat.kind == "multi_turn")
        assert all(content == content.strip() != "" for _, content in chat.messages)
        assert chat.as_messages() == [{"role": role, "content": content} for role, content in chat.messages]
    assert 60 < with_system < 140


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", list(CHECKS))
def test_answers_are_right_by_independent_solution(kind: str, split: Split) -> None:
    for chat in chats(5, 150, split, kind):
        ((prompt, answer),) = turns_of(chat)
        CHECKS[kind](prompt, answer)


@pytest.mark.parametrize("split", SPLITS)
def test_multi_turn_chats_mix_kinds_and_each_answer_is_right(split: Split) -> None:
    kinds = [tuple(check_some(*turn) for turn in turns_of(chat)) for chat in chats(6, 120, split, "multi_turn")]
    assert {kind for chat in kinds for kind in chat} == set(CHECKS)
    assert {len(chat) for chat in kinds} >= {2, 3, 4}


def test_the_oracle_refuses_a_wrong_answer() -> None:
    check_arithmetic("What is 17 + 25?", "17 + 25 = 42")
    check_arithmetic("What is 17 + 25?", "17 + 25 = 37 + 5 = 42")
    for wrong in ("17 + 25 = 43", "17 + 25 = 36 + 5 = 42", "17 - 25 = 42", "25 + 17 = 42"):
        with pytest.raises(AssertionError):
            check_arithmetic("What is 17 + 25?", wrong)


def test_every_user_turn_lies_in_the_split_of_its_conversation() -> None:
    for split in SPLITS:
        for chat in chats(7, 500, split):
            assert {split_of(text) for text in user_turns(chat)} == {split}


def test_no_heldout_prompt_is_in_a_long_training_stream_under_any_seed() -> None:
    trained = {prompt_hash(text) for seed in (1, 2, 3) for chat in chats(seed, 2500, "train") for text in user_turns(chat)}
    heldout = {prompt_hash(text) for seed in (1, 9) for chat in chats(seed, 800, "heldout") for text in user_turns(chat)}
    assert len(trained) > 5000
    assert len(heldout) > 1000
    assert not trained & heldout


@pytest.mark.parametrize("kind", TASK_KINDS)
def test_each_kind_has_many_different_heldout_prompts(kind: str) -> None:
    prompts = {normalise_prompt(text) for chat in chats(8, 400, "heldout", kind) for text in user_turns(chat)}
    assert len(prompts) >= 80


def test_one_prompt_in_eight_is_held_out() -> None:
    held = sum(split_of(f"What is {a} + {b}?") == "heldout" for a in range(100) for b in range(40))
    assert 400 < held < 600


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("  What is\t7 + 2?\n", "what is 7 + 2"),
        ("WHAT IS 7 - 2", "what is 7 - 2"),
        ("Sort: 3,  1, 2.", "sort 3 1 2"),
        ("\uff37hat is \uff17 \uff0b 2\uff1f", "what is 7 + 2"),
        ("Stra\u00dfe", "strasse"),
        ("", ""),
    ],
)
def test_normal_form_of_known_prompts(text: str, normal: str) -> None:
    assert normalise_prompt(text) == normal


def test_operators_keep_questions_apart() -> None:
    assert len({prompt_hash(f"What is 8 {operator} 2?") for operator in "+-*/%<>"}) == 7


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.text(st.characters(codec="ascii", categories=["L", "N", "Zs"]), max_size=60), st.sampled_from(".,;:!?"))
def test_case_spacing_and_sentence_marks_never_change_the_hash(text: str, mark: str) -> None:
    changed = "  " + text.upper().replace(" ", " \n ") + f" {mark}"
    assert prompt_hash(changed) == prompt_hash(text)
    assert split_of(changed) == split_of(text)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.text(max_size=40))
def test_normal_form_is_a_fixed_point(text: str) -> None:
    once = normalise_prompt(text)
    assert normalise_prompt(once) == once
