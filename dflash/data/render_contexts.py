"""Which texts a conversation becomes, and which of their characters the target would have to write.

For an answer at turn t, P(t) is the rendering of everything before it with the generation prompt, T(t) the rendering up to
and including it. P(t) must be a prefix of T(t); what follows is the answer. No pattern is searched in a rendering.

Hard decision: many templates render an earlier turn differently once later turns follow (they drop old reasoning, or add an
empty reasoning block to the last turn only). Such an answer is learnt in the text in which it was really written, T(t), as a
sample of its own; answers that a later text still shows exactly as they were written share that text. So every answer is
supervised exactly once, always behind the very prompt that serving would give, and an ordinary template gives one sample.
A prompt that is no prefix even of its own answer's rendering is a contradiction: the row is refused.

Reasoning: the answer proper begins where two renderings part that differ only in the answer's first character.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dflash.data.quarantine import BadRowError
from dflash.data.render_spans import Span
from dflash.data.render_template import ChatTemplate, Turn, template_turns
from dflash.records import Message

THINK_START, THINK_END = "<think>", "</think>"
"""What parts reasoning from the answer where a source keeps both in one text."""


@dataclass(frozen=True, slots=True)
class Context:
    """One text to learn from.

    Attributes:
        text: the rendering up to and including its last answer, or plain text, of which everything carries loss.
        answers: characters [start, end) of `text` that carry loss, ascending.
        turns: messages that it shows; 0 for plain text.
    """

    text: str
    answers: tuple[Span, ...]
    turns: int


def says_something(message: Message) -> bool:
    """Whether an assistant turn has anything to learn from: text, reasoning or a tool call."""
    return bool(message.content.strip() or message.tool_calls or (message.reasoning or "").strip())


def answer_turns(messages: Sequence[Message], supervise: Literal["all", "last"]) -> list[int]:
    """Indices of the supervised turns, ascending; an assistant turn that says nothing is context only.

    Raises:
        BadRowError: there is none.
    """
    turns = [i for i, message in enumerate(messages) if message.role == "assistant" and says_something(message)]
    if not turns:
        raise BadRowError("no_answer", "no assistant turn to learn from", origin="conversation")
    return turns if supervise == "all" else turns[-1:]


class Conversing:
    """The renderings of one conversation, each made at most once.

    Args:
        template: the target's.
        messages: the conversation.
        tools: JSON schemas for the template.
        supervise_reasoning: whether what comes before the answer proper carries loss too.
    """

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        supervise_reasoning: bool,
    ) -> None:
        self._template = template
        self._messages = messages
        self._turns = template_turns(messages)
        self._tools = tools
        self._supervise_reasoning = supervise_reasoning
        self._prompts: dict[int, str] = {}
        self._throughs: dict[int, str] = {}

    def contexts(self, answers: Sequence[int]) -> list[Context]:
        """The texts that show every answer of `answers` (ascending turns) as it was written, in order.

        Raises:
            BadRowError: the template refuses the turns or contradicts itself.
        """
        if self._supervise_reasoning and (grown := self._grown(answers)) is not None:
            return [grown]
        found: list[Context] = []
        waiting = list(answers)
        while waiting:
            last = waiting[-1]
            text = self._through(last)
            shown = [turn for turn in waiting if turn == last or self._is_shown(turn, text)]
            found.append(Context(text, tuple(self._span(turn) for turn in shown), turns=last + 1))
            waiting = [turn for turn in waiting if turn not in shown]
        return found[::-1]

    def _grown(self, answers: Sequence[int]) -> Context | None:
        """The one text that shows all answers, if the template's text only grows; None where that needs a closer look."""
        last = answers[-1] + 1
        growth = self._template.growth(self._turns[:last], self._tools)
        if growth is None:
            return None
        text, starts = growth.text, growth.starts
        first = starts[answers[0]]
        prompt = self._template.generation_prompt(self._turns[: answers[0]], self._tools, start=first)
        tail = text[starts[last] :]
        spans = [(starts[turn] + len(prompt), starts[turn + 1] + len(tail)) for turn in answers]
        for turn, (start, end) in zip(answers, spans, strict=True):
            shown = text.startswith(prompt, starts[turn]) and text.startswith(tail, starts[turn + 1])
            if not shown or start > end:
                return None
        return Context(text, tuple(spans), turns=last)

    def _is_shown(self, turn: int, text: str) -> bool:
        return text.startswith(self._prompt(turn)) and text.startswith(self._through(turn))

    def _span(self, turn: int) -> Span:
        prompt, through = self._prompt(turn), self._through(turn)
        if not through.startswith(prompt):
            raise _contradiction(prompt, through, turn)
        start = len(prompt)
        if not self._supervise_reasoning:
            start = max(start, self._answer_start(turn))
        return start, len(through)

    def _answer_start(self, turn: int) -> int:
        """Where, in the rendering through `turn`, the answer proper begins."""
        through = self._through(turn)
        starts = (
            _common_length(through, self._render([*self._turns[:turn], other], for_generation=False))
            for other in _other_answers(self._turns[turn])
        )
        return min(starts, default=len(through))

    def _prompt(self, turn: int) -> str:
        if turn not in self._prompts:
            self._prompts[turn] = self._render(self._turns[:turn], for_generation=True)
        return self._prompts[turn]

    def _through(self, turn: int) -> str:
        if turn not in self._throughs:
            self._throughs[turn] = self._render(self._turns[: turn + 1], for_generation=False)
        return self._throughs[turn]

    def _render(self, turns: Sequence[Turn], *, for_generation: bool) -> str:
        return self._template.text(turns, self._tools, for_generation=for_generation)


def without_reasoning(message: Message) -> Message:
    """The same turn, its separate reasoning left out."""
    return replace(message, reasoning=None)


def _other_answers(turn: Turn) -> list[Turn]:
    """The same turn with other first characters of the answer proper; two of them where one could go unnoticed."""
    thoughts, mark, answer = turn["content"].rpartition(THINK_END)
    if not mark and answer.lstrip().startswith(THINK_START):
        return []  # cut off while it was thinking: there is no answer proper
    said = answer.lstrip()
    head = thoughts + mark + answer[: len(answer) - len(said)]
    if said:
        return [{**turn, "content": head + ("y" if said[0] == "x" else "x") + said[1:]}]
    # Nothing but tool calls follows: an inserted text shows where they begin, unless it equals what stands there.
    return [{**turn, "content": head + letter} for letter in "xy"]


def _common_length(one: str, other: str) -> int:
    """Length of the common prefix, by bisection: comparing slices is far faster than a loop over characters."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _contradiction(prompt: str, through: str, turn: int) -> BadRowError:
    at = _common_length(prompt, through)
    return BadRowError(
        "contradiction",
        f"the chat template contradicts itself: the prompt of turn {turn} reads {prompt[at : at + 40]!r} from character {at} on, "
        f"the rendered answer {through[at : at + 40]!r}, so the target could not have written it",
        origin="chat template",
    )
