"""Loss masks of real template families, each checked by hand: the whole text, with what carries loss in double brackets."""

from __future__ import annotations

import itertools
import logging

import pytest
from chat_families import TEMPLATES, family_renderer
from chat_toys import talk

from dflash.data.quarantine import BadRowError
from dflash.data.render import ChatRenderer, Rendered
from dflash.records import Conversation, Message

CHAT = talk("2 + 3?", "2 + 3 = 5", "so?", "fine")
SYSTEM_CHAT = talk("2 + 3?", "5", system="be kind")
WEATHER = ({"type": "function", "function": {"name": "weather"}},)
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"day": 2}}}
WITH_TOOLS = (
    Message("user", "fine?"),
    Message("assistant", "", tool_calls=(CALL,)),
    Message("tool", "7"),
    Message("tool", "so"),
    Message("assistant", "it is fine"),
)


def shown(chat: ChatRenderer, rendered: Rendered) -> str:
    """The sample's text, what carries loss in `[[ ]]`."""
    places = {start: "[[" for start, _ in rendered.loss_spans} | {end: "]]" for _, end in rendered.loss_spans}
    assert len(places) == 2 * len(rendered.loss_spans), "spans are apart"
    ids = rendered.input_ids.tolist()
    cuts = [0, *sorted(places), len(ids)]
    return "".join(
        places.get(start, "") * (start != len(ids)) + chat.tokenizer.decode(ids[start:end])
        for start, end in itertools.pairwise(cuts)
    ) + places.get(len(ids), "")


def samples(chat: ChatRenderer, messages: tuple[Message, ...], tools: tuple[dict[str, object], ...] = ()) -> list[str]:
    (found,) = chat.render_batch([Conversation("c", messages, origin="x:1", kind="toy", tools=tools)])
    assert isinstance(found, tuple), found
    return [shown(chat, each) for each in found]


def test_qwen25_puts_its_own_system_turn_first() -> None:
    assert samples(family_renderer("qwen2.5"), CHAT) == [
        (
            "<|im_start|>system\nYou help.<|im_end|>\n"
            "<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n[[2 + 3 = 5<|im_end|>]]\n"
            "<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n[[fine<|im_end|>]]\n"
        )
    ]
    assert samples(family_renderer("qwen2.5"), SYSTEM_CHAT) == [
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n[[5<|im_end|>]]\n"
    ]


def test_qwen25_calls_a_tool() -> None:
    text = (
        '<|im_start|>system\nTools:\n{"type": "function", "function": {"name": "weather"}}<|im_end|>\n'
        "<|im_start|>user\nfine?<|im_end|>\n<|im_start|>assistant\n"
        '[[<tool_call>\n{"name": "weather", "arguments": {"day": 2}}\n</tool_call><|im_end|>]]\n'
        "<|im_start|>user\n<tool_response>\n7\n</tool_response>\n<tool_response>\nso\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n[[it is fine<|im_end|>]]\n"
    )
    assert samples(family_renderer("qwen2.5"), WITH_TOOLS, WEATHER) == [text]


class TestQwen3:
    OPEN = "<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n"
    THOUGHT = (Message("user", "2?"), Message("assistant", "two", reasoning="so 2"))
    INLINE = talk("2?", "<think>\nso 2\n</think>\n\ntwo")

    @pytest.mark.parametrize("messages", [THOUGHT, INLINE], ids=["field", "inline"])
    def test_reasoning_is_written_by_the_target(self, messages: tuple[Message, ...]) -> None:
        assert samples(family_renderer("qwen3"), messages) == [self.OPEN + "[[<think>\nso 2\n</think>\n\ntwo<|im_end|>]]\n"]

    @pytest.mark.parametrize("messages", [THOUGHT, INLINE], ids=["field", "inline"])
    def test_reasoning_without_loss(self, messages: tuple[Message, ...]) -> None:
        chat = family_renderer("qwen3", supervise_reasoning=False)
        assert samples(chat, messages) == [self.OPEN + "<think>\nso 2\n</think>\n\n[[two<|im_end|>]]\n"]

    @pytest.mark.parametrize("answer", ["two", "x", "xx", "y", "  two"])
    def test_an_empty_block_of_a_thinking_target_is_its_own_work_unless_reasoning_carries_no_loss(self, answer: str) -> None:
        block = self.OPEN + "[[<think>\n\n</think>\n\n" + answer + "<|im_end|>]]\n"
        assert samples(family_renderer("qwen3"), talk("2?", answer)) == [block]
        said = answer.lstrip()
        gap = answer[: len(answer) - len(said)]
        (text,) = samples(family_renderer("qwen3", supervise_reasoning=False), talk("2?", answer))
        assert text.replace(gap, "", 1) == self.OPEN + "<think>\n\n</think>\n\n[[" + said + "<|im_end|>]]\n" or not gap

    def test_with_thinking_off_the_empty_block_belongs_to_the_prompt_and_every_turn_to_a_sample_of_its_own(self) -> None:
        chat = family_renderer("qwen3", enable_thinking=False)
        assert samples(chat, CHAT) == [
            "<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[[2 + 3 = 5<|im_end|>]]\n",
            (
                "<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n2 + 3 = 5<|im_end|>\n"
                "<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[[fine<|im_end|>]]\n"
            ),
        ]

    def test_only_the_last_turn_is_one_sample(self) -> None:
        chat = family_renderer("qwen3", supervise="last", enable_thinking=False)
        assert samples(chat, CHAT) == samples(family_renderer("qwen3", enable_thinking=False), CHAT)[-1:]

    def test_reasoning_between_tool_calls_stays_and_shares_a_sample(self) -> None:
        calling = (
            Message("user", "fine?"),
            Message("assistant", "", reasoning="so ask", tool_calls=(CALL,)),
            Message("tool", "7"),
            Message("assistant", "it is fine", reasoning="7 is so"),
        )
        text = (
            '<|im_start|>system\nTools:\n{"type": "function", "function": {"name": "weather"}}<|im_end|>\n'
            "<|im_start|>user\nfine?<|im_end|>\n<|im_start|>assistant\n"
            '[[<think>\nso ask\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"day": 2}}\n</tool_call><|im_end|>]]\n'
            "<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n[[<think>\n7 is so\n</think>\n\nit is fine<|im_end|>]]\n"
        )
        assert samples(family_renderer("qwen3"), calling, WEATHER) == [text]
        without = samples(family_renderer("qwen3", supervise_reasoning=False), calling, WEATHER)
        assert len(without) == 1
        assert "</think>\n\n[[it is fine<|im_end|>]]" in without[0]
        assert "[[<think>" not in without[0]
        assert without[0].count("[[") == 2, "the call carries loss, its reasoning does not"

    def test_an_answer_cut_off_while_thinking_has_no_part_that_carries_loss_without_reasoning(self) -> None:
        chat = family_renderer("qwen2.5", supervise_reasoning=False)
        (found,) = chat.render_batch([Conversation("c", talk("2?", "<think>\nso"), origin="x:1", kind="toy")], finished=[False])
        assert isinstance(found, tuple)
        assert found[0].loss_spans == ()
        assert not found[0].has_pair


def test_llama3_trims_and_ends_with_one_token() -> None:
    assert samples(family_renderer("llama3"), talk(" 2 + 3? ", " 5\n", "so?", "fine", system="be kind")) == [
        (
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nbe kind<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\n2 + 3?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n[[5<|eot_id|>]]"
            "<|start_header_id|>user<|end_header_id|>\n\nso?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n[[fine<|eot_id|>]]"
        )
    ]


def test_smollm2() -> None:
    assert samples(family_renderer("smollm2"), CHAT) == [
        (
            "<|im_start|>system\nYou are small.<|im_end|>\n"
            "<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n[[2 + 3 = 5<|im_end|>]]\n"
            "<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n[[fine<|im_end|>]]\n"
        )
    ]


GEMMA_TAIL = "2 + 3?<end_of_turn>\n<start_of_turn>model\n[[5<end_of_turn>]]\n"


def test_gemma_names_the_assistant_model() -> None:
    assert samples(family_renderer("gemma2"), CHAT) == [
        (
            "<bos><start_of_turn>user\n2 + 3?<end_of_turn>\n<start_of_turn>model\n[[2 + 3 = 5<end_of_turn>]]\n"
            "<start_of_turn>user\nso?<end_of_turn>\n<start_of_turn>model\n[[fine<end_of_turn>]]\n"
        )
    ]


def test_a_system_turn_is_a_bad_row_where_the_template_raises_and_merged_where_the_template_merges() -> None:
    with pytest.raises(BadRowError, match=r"template: .*\(system, user, assistant\): System role not supported"):
        family_renderer("gemma2").render(SYSTEM_CHAT)
    assert samples(family_renderer("gemma3"), SYSTEM_CHAT) == ["<bos><start_of_turn>user\nbe kind\n\n" + GEMMA_TAIL]
    assert samples(family_renderer("gemma3"), talk("2 + 3?", "5")) == ["<bos><start_of_turn>user\n" + GEMMA_TAIL]


def test_a_refused_conversation_spoils_no_other_of_its_batch() -> None:
    chat = family_renderer("gemma2")
    good, bad = Conversation("a", talk("2?", "so"), "x:1", "toy"), Conversation("b", SYSTEM_CHAT, "x:2", "toy")
    first, refused, last = chat.render_batch([good, bad, good])
    assert isinstance(first, tuple)
    assert first == last
    assert not isinstance(refused, tuple)
    assert refused.origin == "x:2"
    assert refused.reason.startswith("template: ")


def test_plain_text_carries_loss_throughout_and_gets_no_template() -> None:
    chat = family_renderer("llama3")
    (found,) = chat.render_batch([Conversation("t", (), "x:1", "toy", text="the weather <|eot_id|>is\n")])
    assert isinstance(found, tuple)
    assert chat.tokenizer.decode(found[0].input_ids) == "the weather <|eot_id|>is\n"
    assert found[0].loss_spans == ((0, len(found[0])),)
    assert found[0].turns == 0


@pytest.mark.parametrize(("family", "said"), [("smollm2", True), ("qwen3", False)])
def test_it_is_said_once_if_the_template_shows_no_reasoning(family: str, said: bool, caplog: pytest.LogCaptureFixture) -> None:
    chat = family_renderer(family)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            chat.render(TestQwen3.THOUGHT)
    assert caplog.text.count("shows no reasoning") == said


@pytest.mark.parametrize("family", TEMPLATES)
def test_what_the_target_is_prompted_with_begins_the_sample(family: str) -> None:
    chat = family_renderer(family)
    prompt = chat.prompt_ids(CHAT[:3])
    rendered = chat.render(CHAT)
    assert rendered.input_ids[: len(prompt)].tolist() == prompt
    assert rendered.loss_spans[-1][0] == len(prompt)
