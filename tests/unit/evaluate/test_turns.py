"""Second turns: asked behind the target's own greedy answer to the first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dflash.config import Config, DataConfig, EvaluateConfig, TargetConfig
from dflash.data.render import ChatRenderer
from dflash.data.synthetic import prompt_hash
from dflash.data.tokenizer import load_tokenizer, stop_token_ids
from dflash.errors import EvaluationError
from dflash.evaluate import turns as turns_module
from dflash.evaluate.prompt_sets import Question
from dflash.evaluate.prompts import EvalPrompt, drawn_together, renderer_of
from dflash.evaluate.turns import with_later_turns
from dflash.model.generate import generate_batch
from dflash.model.target import Target, load_target
from dflash.records import Conversation, Message

torch.set_num_threads(1)
TARGET = TargetConfig(path="demo", mask_token="<|mask|>")
CONFIG = Config(target=TARGET, data=DataConfig(num_conversations=10), evaluate=EvaluateConfig(max_new_tokens=24, batch_size=2))


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TARGET, target_layer_ids=(0, 1), device=torch.device("cpu"))


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return renderer_of(CONFIG, load_tokenizer(TARGET))


@pytest.fixture(scope="module")
def stop_ids(renderer: ChatRenderer) -> tuple[int, ...]:
    return stop_token_ids(renderer.tokenizer, TARGET)


def first_turn(renderer: ChatRenderer, name: str, *turns: str) -> EvalPrompt:
    chat = Conversation(name, (Message("user", turns[0]),), f"q.jsonl:{name}", "chat")
    ids = tuple(renderer.prompt_ids(chat.messages))
    return EvalPrompt(name, "chat", "mt-bench", ids, prompt_hash(turns[0]), {}, question=Question(chat, turns[1:]))


def test_each_later_turn_stands_behind_the_targets_own_answers(
    target: Target, renderer: ChatRenderer, stop_ids: tuple[int, ...]
) -> None:
    asked = [
        first_turn(renderer, "a", "What is 2 + 3?", "And 4 + 4?", "And 1 + 1?"),
        first_turn(renderer, "b", "Say hello."),
        first_turn(renderer, "c", "Count to 4.", "And 4 + 4?"),
    ]
    found = with_later_turns(target, asked, renderer=renderer, evaluate=CONFIG.evaluate, stop_ids=stop_ids)
    assert [(prompt.id, prompt.turn) for prompt in found] == [("a", 1), ("a#2", 2), ("a#3", 3), ("b", 1), ("c", 1), ("c#2", 2)]
    assert [prompt for prompt in found if prompt.turn == 1] == asked
    assert drawn_together(found) == ["a", "a", "a", "b", "c", "c"], "the turns of a conversation tell of one another"
    alike = [replace(each, id=f"x{each.id}", first_turn=each.first_turn and "xa") for each in found[:2]]
    alike[1] = replace(alike[1], prompt_ids=(*alike[1].prompt_ids, 1))
    assert drawn_together([*found, *alike])[-2:] == ["a", "a"], "it begins as another one does, and goes on otherwise"
    for before, after in ((found[0], found[1]), (found[1], found[2]), (found[4], found[5])):
        (answer,) = generate_batch(
            target, [before.prompt_ids], keys=["x"], max_new_tokens=24, temperature=0.0, seed=0, stop_ids=stop_ids
        )
        spoken = answer[:-1] if answer[-1] in stop_ids else answer
        # The very tokens that the target wrote, then the next question.
        assert list(after.prompt_ids[: len(before.prompt_ids) + len(spoken)]) == [*before.prompt_ids, *spoken]
        assert after.question.conversation.messages[-1].role == "user"
        assert renderer.tokenizer.decode(list(after.prompt_ids)).endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert len({prompt.prompt_hash for prompt in found}) == 6, "the same words behind another first turn are another prompt"


def test_prompts_that_know_no_later_turn_are_left_alone(target: Target, renderer: ChatRenderer, stop_ids: tuple[int, ...]) -> None:
    made_elsewhere = replace(first_turn(renderer, "a", "Say hello."), question=None)
    prompts = [made_elsewhere, first_turn(renderer, "b", "Say hello.")]
    assert with_later_turns(target, prompts, renderer=renderer, evaluate=CONFIG.evaluate, stop_ids=stop_ids) == prompts


def test_a_template_that_refuses_a_second_turn_is_told(target: Target, stop_ids: tuple[int, ...]) -> None:
    tokenizer = load_tokenizer(TARGET)
    tokenizer.chat_template = (
        "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}{{ messages[0]['content'] }}"
    )
    renderer = renderer_of(CONFIG, tokenizer)
    prompts = [first_turn(renderer, "a", "Say hello.", "Again.")]
    with pytest.raises(EvaluationError, match="turn 2 of prompt 'a' cannot be asked"):
        with_later_turns(target, prompts, renderer=renderer, evaluate=CONFIG.evaluate, stop_ids=stop_ids)


def test_a_turn_that_is_too_long_for_the_target_is_named_before_it_is_answered(
    target: Target, renderer: ChatRenderer, stop_ids: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns_module, "generate_batch", lambda *_arguments, **_more: pytest.fail("it is answered"))
    prompts = [first_turn(renderer, "a", "word " * 2000, "Again.")]
    with pytest.raises(EvaluationError, match=r"prompt 'a' has .* the target has 1024"):
        with_later_turns(target, prompts, renderer=renderer, evaluate=CONFIG.evaluate, stop_ids=stop_ids)
