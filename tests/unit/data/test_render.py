"""Loss masks: exactly the answers and their end-of-turn tokens, for several template families."""

from __future__ import annotations

import pytest
from chat_toys import (
    CHATML,
    CHATML_DEFAULT_SYSTEM,
    HEADERS,
    PLAIN,
    THINKING,
    TURNS,
    renderer,
    supervised_texts,
    talk,
    toy_tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data.quarantine import BadRowError
from dflash.data.render import ChatRenderer, Rendered
from dflash.errors import DataError
from dflash.records import Conversation, Message

TWO_ANSWERS = talk("What is 2 + 3?", "2 + 3 = 5.", "And the weather?", "Fine, 7 degrees.")

FAMILIES = {
    "chatml": (CHATML, "<|im_end|>"),
    "chatml with a system turn of its own": (CHATML_DEFAULT_SYSTEM, "<|im_end|>"),
    "headers": (HEADERS, "<|eot|>"),
    "turns": (TURNS, "<|/turn|>"),
    "plain": (PLAIN, ""),
}


@pytest.mark.parametrize(("template", "end"), FAMILIES.values(), ids=FAMILIES)
def test_every_answer_and_its_end_of_turn_token_is_supervised_and_nothing_else(template: str, end: str) -> None:
    rendered = renderer(template).render(TWO_ANSWERS)
    texts = supervised_texts(toy_tokenizer(template), rendered.input_ids, rendered.loss_mask)
    assert texts == [f"2 + 3 = 5.{end}", f"Fine, 7 degrees.{end}"]


@pytest.mark.parametrize(("template", "end"), FAMILIES.values(), ids=FAMILIES)
def test_only_the_last_answer_is_supervised_on_request(template: str, end: str) -> None:
    last = renderer(template, supervise="last").render(TWO_ANSWERS)
    every = renderer(template).render(TWO_ANSWERS)
    assert last.input_ids.tolist() == every.input_ids.tolist()
    texts = supervised_texts(toy_tokenizer(template), last.input_ids, last.loss_mask)
    assert texts == supervised_texts(toy_tokenizer(template), every.input_ids, every.loss_mask)[-1:]


@pytest.mark.parametrize("template", [CHATML, CHATML_DEFAULT_SYSTEM, HEADERS, TURNS])
@pytest.mark.parametrize("turn", [1, 3])
def test_what_the_target_is_prompted_with_is_a_prefix_of_the_sample(template: str, turn: int) -> None:
    chat = renderer(template)
    rendered = chat.render(TWO_ANSWERS)
    prompt = chat.prompt_ids(TWO_ANSWERS[:turn])
    assert rendered.input_ids[: len(prompt)].tolist() == prompt
    assert not rendered.loss_mask[len(prompt) - 1]
    assert rendered.loss_mask[len(prompt)]


def test_the_ids_are_those_of_the_whole_rendering() -> None:
    tokenizer = toy_tokenizer(CHATML)
    whole = tokenizer.apply_chat_template([{"role": m.role, "content": m.content} for m in TWO_ANSWERS], tokenize=False)
    assert renderer(CHATML).render(TWO_ANSWERS).input_ids.tolist() == tokenizer(whole)["input_ids"]


def test_a_system_turn_carries_no_loss() -> None:
    rendered = renderer(CHATML).render(talk("hi", "hello", system="Talk about the weather."))
    assert supervised_texts(toy_tokenizer(CHATML), rendered.input_ids, rendered.loss_mask) == ["hello<|im_end|>"]


def test_the_break_behind_the_end_of_turn_is_not_supervised_because_the_target_never_writes_it() -> None:
    rendered = renderer(CHATML).render(talk("hi", "hello\n"))
    tokenizer = toy_tokenizer(CHATML)
    assert tokenizer.decode(rendered.input_ids[-1:]) == "\n"
    assert rendered.loss_mask[-2:].tolist() == [True, False]
    assert supervised_texts(tokenizer, rendered.input_ids, rendered.loss_mask) == ["hello\n<|im_end|>"]


def test_turns_behind_the_last_answer_are_left_out() -> None:
    chat = renderer(CHATML)
    assert chat.render(talk("hi", "hello", "and now?")) == chat.render(talk("hi", "hello"))


def test_an_answer_that_says_nothing_is_context_only() -> None:
    rendered = renderer(CHATML).render(talk("hi", " \n", "and now?", "hello", "more?", ""))
    assert supervised_texts(toy_tokenizer(CHATML), rendered.input_ids, rendered.loss_mask) == ["hello<|im_end|>"]
    assert rendered == renderer(CHATML).render(talk("hi", " \n", "and now?", "hello"))
    with pytest.raises(BadRowError, match="no_answer"):
        renderer(CHATML).render(talk("hi", ""))


class TestTokensAcrossTheBorder:
    def test_a_token_that_begins_in_the_prompt_is_not_supervised(self) -> None:
        rendered = renderer(CHATML).render(talk("hi", "\nhello"))
        tokenizer = toy_tokenizer(CHATML)
        assert "\n\n" in [tokenizer.decode([token]) for token in rendered.input_ids], "the case needs a merged token"
        assert supervised_texts(tokenizer, rendered.input_ids, rendered.loss_mask) == ["hello<|im_end|>"]

    @pytest.mark.parametrize("trim_offsets", [False, True])
    def test_a_leading_space_counts_even_where_the_tokenizer_does_not_report_it(self, trim_offsets: bool) -> None:
        tokenizer = toy_tokenizer(PLAIN, trim_offsets=trim_offsets)
        rendered = ChatRenderer(tokenizer, supervise="all", supervise_reasoning=True, template_flags={}).render(
            talk("hi", "the weather")
        )
        pieces = [tokenizer.decode([token]) for token in rendered.input_ids]
        assert " the" in pieces, "the case needs a token over the border"
        assert not rendered.loss_mask[pieces.index(" the")]
        assert supervised_texts(tokenizer, rendered.input_ids, rendered.loss_mask) == [" weather"]


class TestThinkingTemplates:
    REASONED = talk("2?", "<think>\nhm\n</think>\n\ntwo", "3?", "<think>\nso\n</think>\n\nthree")

    def test_reasoning_of_the_last_answer_is_supervised(self) -> None:
        rendered = renderer(THINKING, supervise="last").render(self.REASONED)
        texts = supervised_texts(toy_tokenizer(THINKING), rendered.input_ids, rendered.loss_mask)
        assert texts == ["<think>\nso\n</think>\n\nthree<|im_end|>"]

    def test_an_answer_that_later_text_shows_without_its_reasoning_is_learnt_in_a_sample_of_its_own(self) -> None:
        chat = renderer(THINKING)
        (samples,) = chat.render_batch([Conversation("a", self.REASONED, origin="x:1", kind="toy")])
        assert isinstance(samples, tuple)
        texts = [supervised_texts(chat.tokenizer, each.input_ids, each.loss_mask) for each in samples]
        assert texts == [["<think>\nhm\n</think>\n\ntwo<|im_end|>"], ["<think>\nso\n</think>\n\nthree<|im_end|>"]]
        assert "hm" not in chat.tokenizer.decode(samples[1].input_ids), "the context is the one that serving would give"
        assert [each.turns for each in samples] == [2, 4]

    def test_an_answer_that_its_own_prompt_rules_out_is_refused_and_both_readings_are_shown(self) -> None:
        with pytest.raises(BadRowError) as caught:
            renderer(THINKING, enable_thinking=False).render(talk("2?", "<think>\nhm\n</think>\n\ntwo"))
        assert "contradicts itself" in str(caught.value)
        assert "reads '\\n</think>" in str(caught.value)
        assert "'hm\\n</think>" in str(caught.value)
        assert "template_flags" in caught.value.remedy

    def test_an_empty_reasoning_block_of_the_prompt_carries_no_loss(self) -> None:
        chat = renderer(THINKING, enable_thinking=False)
        rendered = chat.render(talk("2?", "two"))
        assert supervised_texts(toy_tokenizer(THINKING), rendered.input_ids, rendered.loss_mask) == ["two<|im_end|>"]
        prompt = chat.prompt_ids(talk("2?"))
        assert rendered.input_ids[: len(prompt)].tolist() == prompt

    def test_without_the_flag_the_same_block_is_the_targets_to_write(self) -> None:
        rendered = renderer(THINKING).render(talk("2?", "two"))
        texts = supervised_texts(toy_tokenizer(THINKING), rendered.input_ids, rendered.loss_mask)
        assert texts == ["<think>\n\n</think>\n\ntwo<|im_end|>"]

    def test_two_turns_whose_history_lacks_the_prompts_block_become_two_samples(self) -> None:
        chat = renderer(THINKING, enable_thinking=False)
        (samples,) = chat.render_batch([Conversation("a", talk("2?", "two", "3?", "three"), origin="x:1", kind="toy")])
        assert isinstance(samples, tuple)
        texts = [supervised_texts(chat.tokenizer, each.input_ids, each.loss_mask) for each in samples]
        assert texts == [["two<|im_end|>"], ["three<|im_end|>"]]
        assert "two<|im_end|>" in chat.tokenizer.decode(samples[1].input_ids)


def unfinished(chat: ChatRenderer, turns: tuple[Message, ...]) -> Rendered:
    """The sample of a conversation whose last answer has no end."""
    [(sample,)] = chat.render_batch([Conversation("a", turns, origin="x:1", kind="toy")], finished=[False])  # type: ignore[misc]
    return sample


class TestUnfinishedAnswers:
    def test_the_end_of_turn_that_the_target_never_wrote_is_cut_off(self) -> None:
        chat = renderer(CHATML)
        cut = unfinished(chat, talk("count", "1, 2, 3,"))
        assert supervised_texts(chat.tokenizer, cut.input_ids, cut.loss_mask) == ["1, 2, 3,"]
        assert cut.loss_mask[-1]

    def test_earlier_turns_keep_theirs(self) -> None:
        chat = renderer(CHATML)
        cut = unfinished(chat, talk("hi", "hello", "count", "1, 2,"))
        assert supervised_texts(chat.tokenizer, cut.input_ids, cut.loss_mask) == ["hello<|im_end|>", "1, 2,"]

    def test_a_template_without_such_a_token_loses_nothing(self) -> None:
        chat = renderer(PLAIN)
        cut = unfinished(chat, talk("hi", "the weather"))
        assert supervised_texts(chat.tokenizer, cut.input_ids, cut.loss_mask) == [" weather"]


class TestRefusals:
    def test_no_answer(self) -> None:
        with pytest.raises(BadRowError, match="no_answer"):
            renderer(CHATML).render(talk("hi"))

    def test_turns_that_the_template_refuses(self) -> None:
        with pytest.raises(BadRowError, match=r"template: .*system, user, assistant.*no system turn here"):
            renderer(TURNS).render(talk("hi", "hello", system="Be kind."))

    @pytest.mark.parametrize("flag", ["tokenize", "add_generation_prompt", "chat_template"])
    def test_flags_that_the_rendering_itself_decides(self, flag: str) -> None:
        with pytest.raises(DataError, match=flag):
            renderer(CHATML, **{flag: True})


CONTENT = st.text(alphabet=st.sampled_from("ab 3.\n\té漢🙂\"'&<>{}"), min_size=1, max_size=24)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(contents=st.lists(CONTENT, min_size=2, max_size=6).filter(lambda c: len(c) % 2 == 0 and all(map(str.strip, c))))
def test_for_any_contents_the_supervised_text_is_the_answer_but_for_a_shared_first_token(contents: list[str]) -> None:
    chat = renderer(CHATML)
    rendered = chat.render(talk(*contents))
    texts = supervised_texts(chat.tokenizer, rendered.input_ids, rendered.loss_mask)
    answers = [f"{content}<|im_end|>" for content in contents[1::2]]
    assert len(texts) == len(answers)
    for text, answer in zip(texts, answers, strict=True):
        assert answer.endswith(text)
        lost = answer.removesuffix(text)
        assert lost.strip() == "", "only white space can merge with the prompt's line break"
    assert chat.tokenizer.decode(rendered.input_ids) == "".join(
        f"<|im_start|>{'assistant' if i % 2 else 'user'}\n{content}<|im_end|>\n" for i, content in enumerate(contents)
    )
