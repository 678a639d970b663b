"""Batches against one exact, slow way: every prefix rendered by transformers itself, every token's offsets looked at."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from chat_families import QWEN25, TEMPLATES, family_renderer, family_tokenizer
from chat_toys import CHATML, CHATML_DEFAULT_SYSTEM, HEADERS, PLAIN, THINKING, TURNS, talk, toy_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Environment
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _compile_jinja_template

from dflash.data.render import ChatRenderer, Rendered
from dflash.data.render_growth import growing_loop
from dflash.data.render_spans import merged
from dflash.records import Conversation, Message

CONTENT = st.text(alphabet=st.sampled_from("ab 3.\n\té漢🙂\"'&<>{}"), min_size=1, max_size=16).filter(
    lambda text: bool(text.strip())
)
CONTENTS = st.lists(CONTENT, min_size=2, max_size=8).filter(lambda contents: len(contents) % 2 == 0)
TOKENIZERS: dict[str, PreTrainedTokenizerFast] = {
    **{family: family_tokenizer(family) for family in TEMPLATES},
    "toy chatml": toy_tokenizer(CHATML),
    "toy plain, trimmed offsets": toy_tokenizer(PLAIN, trim_offsets=True),
    "toy thinking": toy_tokenizer(THINKING),
    "toy headers": toy_tokenizer(HEADERS),
}


def exact(tokenizer: PreTrainedTokenizerFast, messages: tuple[Message, ...]) -> list[tuple[list[int], list[bool]]]:
    """Ids and masks, one context after the other, by the definition."""
    turns = [{"role": message.role, "content": message.content} for message in messages]

    def text(count: int, *, prompt: bool) -> str:
        return str(tokenizer.apply_chat_template(turns[:count], tokenize=False, add_generation_prompt=prompt))

    waiting = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    found: list[tuple[list[int], list[bool]]] = []
    while waiting:
        whole = text(waiting[-1] + 1, prompt=False)
        shown = [
            turn for turn in waiting
            if whole.startswith(text(turn, prompt=True)) and whole.startswith(text(turn + 1, prompt=False))
        ]  # fmt: skip
        encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        mask = [False] * len(encoded["input_ids"])
        for turn in shown:
            start, end = len(text(turn, prompt=True)), len(text(turn + 1, prompt=False))
            inside, before = [], 0
            for place, (first, last) in enumerate(encoded["offset_mapping"]):
                if min(first, before) >= start and last <= end:
                    inside.append((place, whole[min(first, before) : last]))
                before = last
            added = set(tokenizer.added_tokens_decoder)
            while inside and not inside[-1][1].strip() and encoded["input_ids"][inside[-1][0]] not in added:
                inside.pop()
            for place, _ in inside:
                mask[place] = True
        found.append((encoded["input_ids"], mask))
        waiting = [turn for turn in waiting if turn not in shown]
    return found[::-1]


def plain(rendered: Rendered) -> tuple[list[int], list[bool]]:
    return rendered.input_ids.tolist(), rendered.loss_mask.tolist()


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(batch=st.lists(CONTENTS, min_size=1, max_size=3), system=st.none() | CONTENT)
def test_a_batch_is_what_the_exact_way_gives(name: str, batch: list[list[str]], system: str | None) -> None:
    tokenizer = TOKENIZERS[name]
    system = None if name == "gemma2" else system
    talks = [talk(*contents, system=system) for contents in batch]
    chat = ChatRenderer(tokenizer, supervise="all", supervise_reasoning=True, template_flags={})
    found = chat.render_batch([Conversation(str(i), each, f"x:{i}", "toy") for i, each in enumerate(talks)])
    for messages, samples in zip(talks, found, strict=True):
        assert isinstance(samples, tuple), samples
        assert [plain(each) for each in samples] == exact(tokenizer, messages)
        assert chat.render(messages) == samples[-1]
        assert all(each.input_ids.dtype == np.int32 for each in samples)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(contents=CONTENTS, finished=st.booleans())
def test_every_answer_carries_loss_in_exactly_one_sample(contents: list[str], finished: bool) -> None:
    chat = family_renderer("qwen3", enable_thinking=False)
    (samples,) = chat.render_batch([Conversation("a", talk(*contents), "x:1", "toy")], finished=[finished])
    assert isinstance(samples, tuple)
    texts = [chat.tokenizer.decode(each.input_ids[start:end]) for each in samples for start, end in each.loss_spans]
    expected = [f"{content}<|im_end|>" for content in contents[1::2]]
    expected = expected if finished else [*expected[:-1], contents[-1]]
    assert len(texts) == len(expected)
    for found, wanted in zip(texts, expected, strict=True):
        # Leading line breaks are trimmed by the template or part of a token that begins in the prompt.
        assert wanted.lstrip().rstrip() == found.lstrip().rstrip()


def test_leftover_padding_and_truncation_change_nothing() -> None:
    chat = ChatRenderer(toy_tokenizer(CHATML), supervise="all", supervise_reasoning=True, template_flags={})
    expected = chat.render(talk("hi", "the weather is fine"))
    chat.tokenizer(["a", "b c d e f"], padding=True, truncation=True, max_length=3)
    assert chat.render(talk("hi", "the weather is fine")) == expected


GROWS = {
    "chatml": CHATML, "own system turn": CHATML_DEFAULT_SYSTEM, "headers": HEADERS, "turns": TURNS, "plain": PLAIN,
    "llama3": TEMPLATES["llama3"], "smollm2": TEMPLATES["smollm2"], "gemma2": TEMPLATES["gemma2"],
    "gemma3": TEMPLATES["gemma3"],
    "state of the loop": "{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}{{ n.i }}{% endfor %}",
}  # fmt: skip
LOOP = "{% for m in messages %}{{ m.content }}{% endfor %}"
LOOKS_AHEAD = {
    "last": "{% for m in messages %}{{ loop.last }}{% endfor %}",
    "loop as a value": "{% for m in messages %}{% set l = loop %}{{ l.last }}{% endfor %}",
    "length": "{{ messages | length }}" + LOOP,
    "last message": "{{ messages[-1].role }}" + LOOP,
    "second message": "{{ messages[1].role }}" + LOOP,
    "next message": "{% for m in messages %}{{ messages[loop.index].role }}{% endfor %}",
    "messages replaced": "{% set messages = messages[1:] %}" + LOOP,
    "another slice": "{% set rest = messages[:2] %}{% for m in rest %}{{ m.content }}{% endfor %}",
    "other name twice": "{% set r = messages %}{% set r = [] %}{% for m in r %}{{ m.content }}{% endfor %}",
    "two loops": LOOP + LOOP,
    "a loop inside a condition": "{% if tools %}" + LOOP + "{% endif %}",
    "a filtered loop": "{% for m in messages if m.role != 'x' %}{{ m.content }}{% endfor %}",
    "an end of its own": "{% for m in messages %}{{ m.content }}{% else %}none{% endfor %}",
    "break": "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}",
    "prompt inside": "{% for m in messages %}{{ add_generation_prompt }}{% endfor %}",
    "prompt of the loop's making": "{% set n = namespace(a='') %}{% for m in messages %}{% set n.a = m.content %}{% endfor %}"
    "{% if add_generation_prompt %}{{ n.a }}{% endif %}",
    "prompt of the tools' making": LOOP + "{% if add_generation_prompt %}{{ tools }}{% endif %}",
    "text that depends": LOOP + "{{ tools }}",
    "a macro over messages": "{% macro f(messages) %}{{ messages }}{% endmacro %}" + LOOP,
    "qwen3": TEMPLATES["qwen3"],
    "thinking": THINKING,
}  # fmt: skip


class TestGrowingTemplates:
    @staticmethod
    def grows(source: str, *, tool_turns: bool) -> bool:
        environment: Environment = _compile_jinja_template(source).environment
        return growing_loop(environment.parse(source), tool_turns=tool_turns)

    @pytest.mark.parametrize("name", GROWS)
    def test_what_never_looks_ahead_is_told_from_its_syntax(self, name: str) -> None:
        assert self.grows(GROWS[name], tool_turns=True)

    @pytest.mark.parametrize("name", LOOKS_AHEAD)
    def test_anything_that_may_look_ahead_is_rendered_prefix_by_prefix(self, name: str) -> None:
        assert not self.grows(LOOKS_AHEAD[name], tool_turns=True)
        assert not self.grows(LOOKS_AHEAD[name], tool_turns=False)

    def test_a_look_ahead_that_joins_tool_turns_matters_only_if_there_are_any(self) -> None:
        assert not self.grows(QWEN25, tool_turns=True)
        assert self.grows(QWEN25, tool_turns=False)
        or_else = QWEN25.replace("{%- elif m.role == 'tool' %}", "{%- elif m.role == 'tool' or m.content %}")
        assert not self.grows(or_else, tool_turns=False)


@given(spans=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=5))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_merged_spans_cover_the_same_places_and_stand_apart(spans: list[tuple[int, int]]) -> None:
    ascending = sorted(spans)
    joined: tuple[tuple[int, int], ...] = merged(ascending)
    covered = {place for start, end in joined for place in range(start, end)}
    assert covered == {place for start, end in ascending for place in range(start, end)}
    assert all(start < end for start, end in joined)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(joined))


def test_rendered_samples_compare_by_content() -> None:
    def sample(**changes: Any) -> Rendered:
        fields: dict[str, Any] = {"input_ids": np.array([1, 2, 3], np.int32), "loss_spans": ((1, 3),), "turns": 2}
        return Rendered(**{**fields, **changes})

    assert sample() == sample()
    assert sample() != sample(turns=3)
    assert sample() != sample(loss_spans=((1, 2),))
    assert sample() != sample(input_ids=np.array([1, 2, 4], np.int32))
    assert (sample().supervised, sample().has_pair, len(sample())) == (2, True, 3)
    assert not sample(loss_spans=((0, 1), (2, 3))).has_pair
