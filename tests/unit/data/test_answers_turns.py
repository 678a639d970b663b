"""Which turns the target answers, in which context, and in which form its thoughts are kept."""

from __future__ import annotations

from pathlib import Path

from chat_toys import CHATML, THINKING, ToyTarget, conversation, renderer, toy_tokenizer

from dflash.config import AnswerConfig
from dflash.data.answers import (
    AnsweredConversation,
    AnswerSettings,
    GenerateFn,
    InProcessAnswerer,
    answer_conversations,
    count_answers,
)
from dflash.records import Conversation, Message, QuarantinedRow

WITH_TOOLS = "{% if tools %}{{ tools[0].function.name ~ ';' }}{% endif %}" + CHATML

# Opens the thoughts in the prompt, and renders them only where they come in a field of their own.
OPENED = """\
{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' }}
{%- if m.role == 'assistant' and m.reasoning_content %}{{ '<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n\\n' }}{% endif %}
{{- m.content ~ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""

STOP = toy_tokenizer(CHATML).convert_tokens_to_ids("<|im_end|>")


def toy() -> ToyTarget:
    return ToyTarget(toy_tokenizer(CHATML))


def answered(
    source: Conversation, journal: Path, generate: GenerateFn, *, template: str = CHATML
) -> AnsweredConversation | QuarantinedRow:
    [item] = answer_conversations(
        [source],
        answerer=InProcessAnswerer(generate, batch_size=3, stop_ids=[STOP]),
        settings=AnswerSettings(renderer(template), AnswerConfig(max_new_tokens=24), 400, count_answers([source])),
        journal=journal,
        progress=lambda *_: None,
    )
    return item


def contents(item: AnsweredConversation | QuarantinedRow) -> list[str]:
    assert isinstance(item, AnsweredConversation)
    return [message.content for message in item.conversation.messages]


class TestTurns:
    def test_a_greeting_before_the_first_question_is_dropped_and_answers_in_a_row_become_one(self, tmp_path: Path) -> None:
        said = (("assistant", "Hi!"), ("user", "1 words"), ("assistant", "a"), ("assistant", "b"), ("user", "2 words"))
        source = Conversation("c", tuple(Message(role, text) for role, text in said), "toy", "toy")
        item = answered(source, tmp_path / "j", toy())
        assert contents(item) == ["1 words", "yes", "2 words", "yes yes"]

    def test_questions_in_a_row_have_one_answer(self, tmp_path: Path) -> None:
        source = Conversation("c", (Message("user", "hi"), Message("user", "2 words"), Message("assistant", "x")), "toy", "toy")
        item = answered(source, tmp_path / "j", toy())
        assert contents(item) == ["hi", "2 words", "yes yes"]

    def test_a_conversation_ends_with_the_targets_own_words_before_the_first_tool_result(self, tmp_path: Path) -> None:
        tools = ({"type": "function", "function": {"name": "weather"}},)
        said = (
            Message("user", "1 words"), Message("assistant", "x"), Message("user", "3 words"),
            Message("assistant", "", tool_calls=({"name": "weather"},)), Message("tool", "rain", name="weather"),
            Message("assistant", "It rains."), Message("user", "thanks"), Message("assistant", "x"),
        )  # fmt: skip
        target = toy()
        source = Conversation("c", said, "toy", "toy", tools=tools)
        item = answered(source, tmp_path / "j", target, template=WITH_TOOLS)
        assert contents(item) == ["1 words", "yes", "3 words", "yes yes yes"]
        assert isinstance(item, AnsweredConversation)
        assert item.conversation.tools == tools
        assert not any(message.tool_calls for message in item.conversation.messages)
        assert all(prompt.startswith("weather;") for prompt in target.asked), "the target knows the tools"


class TestReasoning:
    def thinking(self, prompts: list[list[int]], keys: list[str]) -> list[list[int]]:
        self.asked = [toy_tokenizer(THINKING).decode(prompt) for prompt in prompts]
        return [toy_tokenizer(THINKING)("<think>hm</think>\n\nyes<|im_end|>")["input_ids"] for _ in prompts]

    def test_it_stays_in_the_answer_and_the_template_decides_whether_it_is_seen_again(self, tmp_path: Path) -> None:
        source = conversation("c", "2 words", "x", "3 words", "x")
        item = answered(source, tmp_path / "j", self.thinking, template=THINKING)
        assert contents(item)[1::2] == ["<think>hm</think>\n\nyes"] * 2
        assert isinstance(item, AnsweredConversation)
        assert item.exact
        assert "hm" not in self.asked[0], "this template drops the thoughts of earlier answers"

    def test_it_is_kept_apart_where_only_that_renders_as_the_generated_tokens(self, tmp_path: Path) -> None:
        def opened(prompts: list[list[int]], keys: list[str]) -> list[list[int]]:
            return [toy_tokenizer(OPENED)("hm\n</think>\n\nyes<|im_end|>")["input_ids"] for _ in prompts]

        item = answered(conversation("c", "hi"), tmp_path / "j", opened, template=OPENED)
        assert isinstance(item, AnsweredConversation)
        assert item.conversation.messages[-1] == Message("assistant", "yes", reasoning="hm")
        assert item.exact
        target = toy()
        assert answered(conversation("c", "hi"), tmp_path / "j", target, template=OPENED) == item, "the journal keeps the form"
        assert not target.asked
