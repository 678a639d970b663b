"""Second and later turns: prompts that exist only once the target has answered the turn before.

Invariant: what stands between two user turns is the target's own greedy answer, whatever temperature is evaluated: the prompts of
an evaluation are the same for every drafter, every sample and every batch size (up to near-ties of the kernels).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from dflash.config import EvaluateConfig
from dflash.data.answers_turns import answer_forms
from dflash.data.quarantine import BadRowError
from dflash.data.render import ChatRenderer
from dflash.data.synthetic import prompt_hash
from dflash.errors import EvaluationError
from dflash.evaluate.prompts import EvalPrompt, require_room
from dflash.model.generate import generate_batch
from dflash.model.target import Target
from dflash.records import Message

Answer = Callable[[Sequence[EvalPrompt]], list[list[int]]]
"""The target's own greedy answers, the stop token included."""


def with_later_turns(
    target: Target, prompts: Sequence[EvalPrompt], *, renderer: ChatRenderer, evaluate: EvaluateConfig, stop_ids: Collection[int]
) -> list[EvalPrompt]:
    """The prompts, each followed by those of its later turns.

    Args:
        target: answers the turn before, greedily.
        prompts: first turns.
        renderer: of the run.
        evaluate: longest answer and batch size.
        stop_ids: tokens that end an answer.

    Raises:
        EvaluationError: the chat template refuses a later turn, or a turn is too long for the target.
    """

    def answer(asked: Sequence[EvalPrompt]) -> list[list[int]]:
        require_room(
            asked,
            positions=target.info.max_position_embeddings,
            new_tokens=evaluate.max_new_tokens,
            block_size=1,
            key="evaluate.max_new_tokens",
        )
        answers: list[list[int]] = []
        for first in range(0, len(asked), evaluate.batch_size):
            batch = asked[first : first + evaluate.batch_size]
            answers += generate_batch(
                target,
                [prompt.prompt_ids for prompt in batch],
                keys=[prompt.id for prompt in batch],
                max_new_tokens=evaluate.max_new_tokens,
                temperature=0.0,
                seed=0,
                stop_ids=stop_ids,
            )
        return answers

    return follow_turns(prompts, answer=answer, renderer=renderer, stop_ids=stop_ids)


def follow_turns(
    prompts: Sequence[EvalPrompt], *, answer: Answer, renderer: ChatRenderer, stop_ids: Collection[int]
) -> list[EvalPrompt]:
    """The prompts, each followed by those of its later turns; see `with_later_turns`."""
    behind: dict[str, list[EvalPrompt]] = {prompt.id: [prompt] for prompt in prompts}
    waiting = [(prompt.id, prompt) for prompt in prompts if _later(prompt)]
    while waiting:
        answers = answer([prompt for _, prompt in waiting])
        going = []
        for (head, prompt), said in zip(waiting, answers, strict=True):
            spoken = said[:-1] if said[-1] in stop_ids else said
            following = _next_turn(prompt, spoken, head, renderer)
            behind[head].append(following)
            if _later(following):
                going.append((head, following))
        waiting = going
    return [prompt for group in behind.values() for prompt in group]


def _later(prompt: EvalPrompt) -> tuple[str, ...]:
    return () if prompt.question is None else prompt.question.later_turns


def _next_turn(prompt: EvalPrompt, answer: Sequence[int], head: str, renderer: ChatRenderer) -> EvalPrompt:
    """What is asked behind an answer, which is given without its stop token."""
    question = prompt.question
    if question is None:
        raise AssertionError("a prompt without its question has no later turn")
    asked, *later = question.later_turns
    chat = question.conversation
    turn = prompt.turn + 1
    identifier = f"{head}#{turn}"
    text = str(renderer.tokenizer.decode(answer, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    wanted = [*prompt.prompt_ids, *answer]
    try:
        # The form that renders as the very tokens of the answer; the literal one where a template shows earlier answers otherwise.
        for form in (*answer_forms(text), Message("assistant", text)):
            messages = (*chat.messages, form, Message("user", asked))
            ids = renderer.prompt_ids(messages, chat.tools)
            if ids[: len(wanted)] == wanted:
                break
    except BadRowError as error:
        raise EvaluationError(
            f"turn {turn} of prompt {head!r} cannot be asked: {error.row.reason}", remedy="take the row's later turns out"
        ) from error
    said = [message.content for message in messages if message.role == "user"]
    return replace(
        prompt,
        id=identifier,
        prompt_ids=tuple(ids),
        # Of all that was asked: what follows is often the same few words ("Explain that again").
        prompt_hash=prompt_hash("\n".join(said)),
        turn=turn,
        first_turn=head,
        question=replace(question, conversation=replace(chat, id=identifier, messages=messages), later_turns=tuple(later)),
    )
