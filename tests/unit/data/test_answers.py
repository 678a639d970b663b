"""On-policy answers: in order, over the target's own words, and never lost or repeated by a kill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
from chat_toys import CHATML, ToyTarget, conversation, renderer, talk, toy_tokenizer

from dflash.config import AnswerConfig
from dflash.data.answers import (
    AnsweredConversation,
    AnswerSettings,
    GenerateFn,
    InProcessAnswerer,
    answer_conversations,
    count_answers,
)
from dflash.data.answers_engine import Failure, Question, Reply
from dflash.errors import DataError
from dflash.records import Conversation, Message, QuarantinedRow

STOP = toy_tokenizer(CHATML).convert_tokens_to_ids("<|im_end|>")


def settings_for(*, batch_size: int = 3, keep_unfinished: bool = False, temperature: float = 0.0) -> AnswerConfig:
    return AnswerConfig(max_new_tokens=24, batch_size=batch_size, keep_unfinished=keep_unfinished, temperature=temperature)


def answered(
    conversations: Sequence[Conversation],
    journal: Path,
    generate: GenerateFn,
    *,
    answers: AnswerConfig | None = None,
    max_length_tokens: int = 400,
    template: str = CHATML,
    ticks: list[tuple[str, int, int]] | None = None,
) -> list[AnsweredConversation | QuarantinedRow]:
    answers = answers or settings_for()
    return list(
        answer_conversations(
            iter(conversations),
            answerer=InProcessAnswerer(generate, batch_size=answers.batch_size, stop_ids=[STOP]),
            settings=AnswerSettings(renderer(template), answers, max_length_tokens, count_answers(conversations)),
            journal=journal,
            progress=lambda *tick: ticks.append(tick) if ticks is not None else None,
        )
    )


def toy() -> ToyTarget:
    return ToyTarget(toy_tokenizer(CHATML))


def contents(item: AnsweredConversation | QuarantinedRow) -> list[str]:
    assert isinstance(item, AnsweredConversation)
    return [message.content for message in item.conversation.messages]


def many(count: int) -> list[Conversation]:
    """Conversations of one to three questions; the answers in the corpus are nonsense that must vanish."""
    asked = [[f"{1 + (i * 7 + turn) % 5} words" for turn in range(1 + i % 3)] for i in range(count)]
    return [
        conversation(f"c{i}", *[text for question in questions for text in (question, "off-policy nonsense")])
        for i, questions in enumerate(asked)
    ]


def test_the_target_writes_every_answer_over_its_own_earlier_ones(tmp_path: Path) -> None:
    target = toy()
    [item] = answered([conversation("c", "2 words", "nonsense", "hi", "nonsense")], tmp_path / "j", target)
    first_prompt = "<|im_start|>user\n2 words<|im_end|>\n<|im_start|>assistant\n"
    second_prompt = f"{first_prompt}yes yes<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert target.asked == [first_prompt, second_prompt]
    assert contents(item) == ["2 words", "yes yes", "hi", f"{len(second_prompt)} characters"]


def test_a_last_user_turn_is_answered_and_a_system_turn_stays(tmp_path: Path) -> None:
    source = Conversation("c", talk("3 words", system="Be kind."), "toy", "toy")
    [item] = answered([source], tmp_path / "j", toy())
    assert contents(item) == ["Be kind.", "3 words", "yes yes yes"]


def test_conversations_leave_in_the_order_they_came_with_their_identity(tmp_path: Path) -> None:
    source = many(40)
    result = answered(source, tmp_path / "j", toy())
    assert [item.conversation.id for item in result if isinstance(item, AnsweredConversation)] == [c.id for c in source]
    for item, before in zip(result, source, strict=True):
        assert isinstance(item, AnsweredConversation)
        assert item.exact
        assert item.finished
        assert (item.conversation.origin, item.conversation.kind) == (before.origin, before.kind)
        for question, answer in zip(contents(item)[::2], contents(item)[1::2], strict=True):
            assert answer == " ".join(["yes"] * int(question[0]))


def test_batches_are_full_and_hold_prompts_of_similar_length(tmp_path: Path) -> None:
    target = toy()
    lengths: list[list[int]] = []

    def watched(prompts: list[list[int]], keys: list[str]) -> list[list[int]]:
        lengths.append([len(prompt) for prompt in prompts])
        return target(prompts, keys)

    source = [conversation(f"c{i}", "a" * (1 + 13 * i % 20)) for i in range(10)]
    answered(source, tmp_path / "j", watched, answers=settings_for(batch_size=4))
    assert [len(batch) for batch in lengths] == [4, 4, 2]
    flat = [length for batch in lengths for length in batch]
    assert flat == sorted(flat)


def test_every_sampled_prompt_has_a_key_of_its_own_that_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    keys = []
    for size in (1, 5):
        target = toy()
        answered(many(9), tmp_path / f"j{size}", target, answers=settings_for(batch_size=size, temperature=0.5))
        assert len(set(target.keys)) == len(target.keys) == count_answers(many(9))
        keys.append(sorted(target.keys))
    assert keys[0] == keys[1]


@pytest.mark.parametrize("batch_size", [1, 2, 7, 64])
def test_answers_do_not_depend_on_the_batch_size_and_equal_prompts_are_asked_once(tmp_path: Path, batch_size: int) -> None:
    target = toy()
    got = answered(many(30), tmp_path / "j", target, answers=settings_for(batch_size=batch_size))
    assert got == answered(many(30), tmp_path / "one", toy())
    assert len(set(target.asked)) == len(target.asked)
    assert len(target.asked) < count_answers(many(30)), "the corpus repeats itself"


def test_conversations_are_read_only_a_bounded_way_ahead(tmp_path: Path) -> None:
    read = 0

    def source() -> Iterator[Conversation]:
        nonlocal read
        for item in many(200):
            read += 1
            yield item

    answers = settings_for(batch_size=2)
    engine = InProcessAnswerer(toy(), batch_size=2, stop_ids=[STOP])
    settings = AnswerSettings(renderer(CHATML), answers, 400, None)
    ticks: list[tuple[str, int, int]] = []
    rows = answer_conversations(
        source(), answerer=engine, settings=settings, journal=tmp_path / "j", progress=lambda *tick: ticks.append(tick)
    )
    for left, _ in enumerate(rows, start=1):
        assert read <= left + engine.window
    assert read == 200
    assert ticks[-1][1] == ticks[-1][2] == count_answers(many(200)), "without a count, what was begun is the total"


def test_progress_counts_turns_up_to_all_of_them(tmp_path: Path) -> None:
    ticks: list[tuple[str, int, int]] = []
    source = [*many(7), conversation("m", "mute", "x", "2 words", "x")]
    answered(source, tmp_path / "j", toy(), ticks=ticks)
    total = sum(len(c.messages) // 2 for c in source)
    assert {label for label, _, _ in ticks} == {"answers"}
    assert [done for _, done, _ in ticks] == sorted(done for _, done, _ in ticks)
    assert ticks[-1] == ("answers", total, total)


class TestUnusableAnswers:
    def test_an_answer_without_a_stop_token_sets_the_conversation_aside(self, tmp_path: Path) -> None:
        source = [conversation("a", "2 words"), conversation("b", "loop"), conversation("c", "3 words")]
        first, bad, last = answered(source, tmp_path / "j", toy())
        assert bad == QuarantinedRow("toy:b", "unfinished: answer 0 has no stop token within 24 tokens")
        assert contents(first)[1] == "yes yes"
        assert contents(last)[1] == "yes yes yes"

    def test_it_can_be_kept_if_it_is_the_last(self, tmp_path: Path) -> None:
        source = [conversation("a", "loop"), conversation("b", "loop", "x", "2 words", "x")]
        kept, bad = answered(source, tmp_path / "j", toy(), answers=settings_for(keep_unfinished=True))
        assert isinstance(kept, AnsweredConversation)
        assert not kept.finished
        assert contents(kept)[1] == " and" * 24
        assert isinstance(bad, QuarantinedRow), "a turn that follows would answer something that was not said"

    def test_an_empty_answer_sets_the_conversation_aside(self, tmp_path: Path) -> None:
        target = toy()
        [bad] = answered([conversation("a", "mute", "x", "2 words", "x")], tmp_path / "j", target)
        assert bad == QuarantinedRow("toy:a", "empty_answer: the target says nothing in answer 0")
        assert len(target.asked) == 1, "nothing is asked behind an unusable answer"

    def test_a_prompt_without_room_for_an_answer_is_not_asked(self, tmp_path: Path) -> None:
        target = toy()
        source = [conversation("long", "a" * 60), conversation("short", "2 words")]
        bad, good = answered(source, tmp_path / "j", target, max_length_tokens=40)
        assert isinstance(bad, QuarantinedRow)
        assert bad.reason.startswith("over_long: the prompt of answer 0 has ")
        assert isinstance(good, AnsweredConversation)
        assert len(target.asked) == 1

    def test_a_prompt_that_the_engine_could_not_answer_is_set_aside_with_its_reason(self, tmp_path: Path) -> None:
        class Refusing:
            """Answers all but one question."""

            window = 5

            def session(self) -> Any:
                return nullcontext(self)

            def __init__(self) -> None:
                self.questions: list[Question] = []
                self.engine = InProcessAnswerer(toy(), batch_size=1, stop_ids=[STOP])

            def submit(self, question: Question) -> None:
                self.questions.append(question)

            def collect(self) -> list[Reply]:
                question = self.questions.pop()
                if question.key == "b/1":
                    return [Reply(question, Failure("HTTP 500: it broke"))]
                with self.engine.session() as session:
                    session.submit(question)
                    return session.collect()

        source = [conversation(name, "2 words", "x", f"{n} words", "x", "hi", "x") for name, n in (("a", 1), ("b", 2), ("c", 3))]
        first, bad, last = answer_conversations(
            source,
            answerer=Refusing(),
            settings=AnswerSettings(renderer(CHATML), settings_for(), 400, None),
            journal=tmp_path / "j",
            progress=lambda *_: None,
        )
        assert bad == QuarantinedRow("toy:b", "unanswered: answer 1: HTTP 500: it broke")
        assert contents(first)[3] == "yes"
        assert contents(last)[3] == "yes yes yes"

    def test_a_conversation_without_a_question_is_set_aside(self, tmp_path: Path) -> None:
        greeting = Conversation("c", (Message("assistant", "Hello!"),), "toy:c", "toy")
        text = Conversation("t", (), "toy:t", "toy", text="plain")
        for bad in answered([greeting, text], tmp_path / "j", toy()):
            assert isinstance(bad, QuarantinedRow)
            assert bad.reason == "no_answer: there is no user turn that the target could answer"


def test_an_answer_that_the_rendering_changes_is_reported_as_inexact(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer(CHATML)
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "the"]  # rendering would merge these

    def spelled(prompts: list[list[int]], keys: list[str]) -> list[list[int]]:
        return [[*letters, STOP] for _ in prompts]

    [item] = answered([conversation("c", "hi")], tmp_path / "j", spelled)
    assert contents(item)[1] == "the"
    assert isinstance(item, AnsweredConversation)
    assert not item.exact


class KilledError(Exception):
    """Stands for a kill inside the target."""


def dying(target: ToyTarget, *, after_batches: int) -> GenerateFn:
    def generate(prompts: list[list[int]], keys: list[str]) -> list[list[int]]:
        if len(target.batches) == after_batches:
            raise KilledError
        return target(prompts, keys)

    return generate


class TestResume:
    @pytest.mark.parametrize("after_batches", [0, 1, 3])
    def test_what_was_journalled_is_not_asked_again(self, tmp_path: Path, after_batches: int) -> None:
        source, journal = many(20), tmp_path / "journal.jsonl"
        undisturbed, before = toy(), toy()
        whole = answered(source, tmp_path / "other", undisturbed)
        with pytest.raises(KilledError):
            answered(source, journal, dying(before, after_batches=after_batches))
        after = toy()
        assert answered(source, journal, after) == whole
        assert sorted(before.asked + after.asked) == sorted(undisturbed.asked)

    def test_closing_it_in_the_middle_frees_the_journal(self, tmp_path: Path) -> None:
        settings = AnswerSettings(renderer(CHATML), settings_for(), 400, None)
        engine = InProcessAnswerer(toy(), batch_size=3, stop_ids=[STOP])
        for count in (1, 5):  # each takes up where the one before was closed
            with closing(
                answer_conversations(many(20), answerer=engine, settings=settings, journal=tmp_path / "j", progress=lambda *_: None)
            ) as rows:
                for _ in range(count):
                    next(rows)
        assert answered(many(20), tmp_path / "j", toy()) == answered(many(20), tmp_path / "other", toy())

    def test_a_finished_journal_needs_no_target(self, tmp_path: Path) -> None:
        source, journal = many(20), tmp_path / "j"
        whole = answered(source, journal, toy())
        assert answered(source, journal, dying(toy(), after_batches=0)) == whole

    def test_a_last_line_torn_anywhere_costs_that_answer_alone(self, tmp_path: Path) -> None:
        source, journal = many(6), tmp_path / "j"
        whole = answered(source, journal, toy())
        content = journal.read_bytes()
        last_start = content.rstrip(b"\n").rfind(b"\n") + 1
        for cut in range(last_start, len(content), 7):
            journal.write_bytes(content[:cut])
            target = toy()
            assert answered(source, journal, target) == whole
            assert len(target.keys) == 1
            assert journal.read_bytes() == content

    def test_zeros_behind_the_last_line_are_a_torn_line(self, tmp_path: Path) -> None:
        source, journal = many(6), tmp_path / "j"
        whole = answered(source, journal, toy())
        content = journal.read_bytes()
        journal.write_bytes(content + bytes(100))
        assert answered(source, journal, dying(toy(), after_batches=0)) == whole
        assert journal.read_bytes() == content

    def test_a_damaged_line_before_the_last_is_named(self, tmp_path: Path) -> None:
        journal = tmp_path / "j"
        answered(many(6), journal, toy())
        lines = journal.read_bytes().split(b"\n")
        journal.write_bytes(b"\n".join([*lines[:2], lines[2][:-5], *lines[3:]]))
        with pytest.raises(DataError, match="damaged") as caught:
            answered(many(6), journal, toy())
        assert f"{journal}:3" in str(caught.value)
        assert "its answer alone is generated again" in str(caught.value)

    @pytest.mark.parametrize("change", ["question", "system", "limit"])
    def test_an_answer_is_never_reused_for_another_prompt(self, tmp_path: Path, change: str) -> None:
        answered([Conversation("c", talk("2 words"), "toy", "toy")], tmp_path / "j", toy())
        question = "3 words" if change == "question" else "2 words"
        system = "Be kind." if change == "system" else None
        answers = AnswerConfig(max_new_tokens=25 if change == "limit" else 24)
        target = toy()
        answered([Conversation("c", talk(question, system=system), "toy", "toy")], tmp_path / "j", target, answers=answers)
        assert len(target.asked) == 1
